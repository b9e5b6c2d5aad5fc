"""Blocks: the free list that is also the LRU, reference counts, and what may be found again."""

from __future__ import annotations

import pytest

from tritium.llm.core.blocks import BlockPool, BlockTable, scope

SIZE = 4
ROOT = scope("")


def make(num_blocks: int = 8) -> BlockPool:
    return BlockPool(num_blocks, SIZE, b"key")


def fill(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> BlockTable:
    """Runs a sequence through the pool, and leaves it holding its blocks."""
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, tokens, root)
    found = pool.match(hashes, tokens, root)
    pool.share(found)
    table = BlockTable([b.id for b in found], found[-1].serial if found else root, len(found))
    table.ids += pool.allocate(-(-len(tokens) // SIZE) - len(found)) or []
    pool.publish(table, hashes, tokens, len(tokens) // SIZE)
    pool.check_integrity()
    return table


def hits(pool: BlockPool, tokens: list[int], root: bytes = ROOT) -> list[int]:
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, tokens, root)
    return [block.id for block in pool.match(hashes, tokens, root)]


def constant_hash(hashes: list[bytes], tokens: list[int], root: bytes) -> None:
    while len(hashes) < len(tokens) // SIZE:
        hashes.append(b"same")


def test_allocate_takes_all_or_nothing():
    pool = make(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.check_integrity()


def test_blocks_that_hold_nothing_are_taken_before_cached_ones():
    pool = make(4)
    cached = fill(pool, list(range(8)))
    plain = pool.allocate(2) or []
    pool.free(plain)
    pool.free(cached.ids)
    assert set(pool.allocate(2) or []) == set(plain)
    assert hits(pool, list(range(9))) == cached.ids


def test_the_least_recently_used_prefix_goes_first_and_its_tail_before_its_head():
    pool = make(4)
    old, young = fill(pool, list(range(8))), fill(pool, list(range(50, 58)))
    pool.free(old.ids)
    pool.free(young.ids)
    assert pool.allocate(1) == [old.ids[1]]
    assert hits(pool, list(range(9))) == old.ids[:1]
    assert hits(pool, list(range(50, 59))) == young.ids
    pool.check_integrity()


def test_a_use_makes_a_prefix_young_again():
    pool = make(4)
    old, young = fill(pool, list(range(8))), fill(pool, list(range(50, 58)))
    pool.free(old.ids)
    pool.free(young.ids)
    again = fill(pool, [*range(8), 9])
    assert again.ids[:2] == old.ids
    pool.free(again.ids)
    assert pool.allocate(2) is not None
    assert hits(pool, list(range(9))) == old.ids


def test_shared_blocks_come_free_with_their_last_holder():
    pool = make()
    first = fill(pool, list(range(9)))
    second = fill(pool, list(range(9)))
    assert second.ids[:2] == first.ids[:2] and second.ids[2] != first.ids[2]
    pool.free(first.ids)
    assert pool.num_free == 8 - 3
    pool.free(second.ids)
    assert pool.num_free == 8
    pool.check_integrity()


@pytest.mark.parametrize(("length", "expected"), [(7, 1), (8, 1), (9, 2), (4, 0), (1, 0)])
def test_a_hit_never_covers_the_last_token(length: int, expected: int):
    pool = make()
    fill(pool, list(range(12)))
    assert len(hits(pool, list(range(length)))) == expected


def test_prefixes_of_other_scopes_are_not_found():
    pool = make()
    fill(pool, list(range(8)), scope("a"))
    assert hits(pool, list(range(9)), scope("b")) == []
    assert hits(pool, list(range(9)), scope("a")) != []
    assert scope("bc", "a") != scope("c", "ab")
    assert scope("\ud800") != scope("\ud801")


def test_hashes_are_chained_keyed_and_made_once():
    pool, other = make(), BlockPool(1, SIZE, b"other key")
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, [1, 2, 3], ROOT)
    assert hashes == []
    pool.extend_hashes(hashes, [1, 2, 3, 4, 1, 2, 3, 4, 5], ROOT)
    assert len(hashes) == 2 and hashes[0] != hashes[1] and len(hashes[0]) == 16
    foreign: list[bytes] = []
    other.extend_hashes(foreign, [1, 2, 3, 4], ROOT)
    assert foreign[0] != hashes[0]
    hashes[1] = b"kept"
    pool.extend_hashes(hashes, [1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8], ROOT)
    assert hashes[1] == b"kept" and len(hashes) == 3


def test_equal_blocks_computed_twice_are_found_once():
    pool = make()
    tokens = list(range(9))
    hashes: list[bytes] = []
    pool.extend_hashes(hashes, tokens, ROOT)
    tables = [BlockTable(pool.allocate(3) or [], ROOT) for _ in range(2)]
    for table in tables:
        pool.publish(table, hashes, tokens, 2)
    pool.check_integrity()
    assert hits(pool, tokens) == tables[0].ids[:2]
    assert tables[1].published == 2 and tables[1].parent == tables[0].parent
    # What the second one adds hangs on the blocks that can be found.
    longer = [*tokens, 20, 21, 22, 23]
    pool.extend_hashes(hashes, longer, ROOT)
    pool.publish(tables[1], hashes, longer, 3)
    assert hits(pool, longer) == [*tables[0].ids[:2], tables[1].ids[2]]


def test_unpublished_blocks_are_not_found_but_still_held():
    pool = make()
    table = fill(pool, list(range(8)))
    pool.unpublish(table.ids)
    assert hits(pool, list(range(9))) == []
    assert pool.num_free == 6
    pool.free(table.ids)
    pool.check_integrity()


def test_a_collision_is_no_hit():
    pool = make()
    pool.extend_hashes = constant_hash
    first = fill(pool, [1, 1, 1, 1])
    assert hits(pool, [1, 1, 1, 1, 9]) == first.ids
    assert hits(pool, [2, 2, 2, 2, 9]) == [], "other tokens"
    assert hits(pool, [1, 1, 1, 1, 9], scope("salt")) == [], "same tokens, other scope"
    # The second block replaces the first in the index; its tokens are those of a first block asked for now.
    second = fill(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    assert second.ids[0] == first.ids[0]
    assert hits(pool, [2, 2, 2, 2, 9]) == [], "same tokens, other parent"


def test_a_child_is_not_found_under_another_parent_in_the_same_block():
    pool = make(2)
    pool.extend_hashes = lambda hashes, tokens, root: hashes.extend([b"one", b"two"][len(hashes) : len(tokens) // SIZE])
    table = fill(pool, [1, 1, 1, 1, 2, 2, 2, 2])
    pool.free(table.ids[:1])
    other = BlockTable(pool.allocate(1) or [], ROOT)
    assert other.ids == table.ids[:1], "the parent's block was given away"
    pool.publish(other, [b"one"], [3, 3, 3, 3], 1)
    assert hits(pool, [3, 3, 3, 3, 2, 2, 2, 2, 9]) == other.ids


def test_check_integrity_finds_a_lost_block():
    pool = make(2)
    pool.blocks[0].refs = 1
    with pytest.raises(AssertionError, match="block 0 has 1 refs"):
        pool.check_integrity()
