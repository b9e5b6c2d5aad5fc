"""Blocks of the KV cache: who holds them, what they hold, and which one is given up next.

A block is ``block_size`` token positions of keys and values on the device; here it is a number and a few
facts. Paging follows vLLM's PagedAttention (Kwon et al. 2023). Full blocks are found again by a hash that
is chained over the prefix, as in its automatic prefix caching; unlike there, the hash is only an index:
a hit also compares the tokens and the identity of the parent, so that a collision costs time and never
an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

DIGEST_BYTES = 16
_ROOT = b"tritium-kv-root"
_BLOCK = b"tritium-kv-block"


def scope(salt: str, adapter: str = "") -> bytes:
    """Who may share blocks: an injective encoding of what, beside the tokens, decides keys and values."""
    name = adapter.encode("utf-8", "surrogatepass")
    return len(name).to_bytes(8, "little") + name + salt.encode("utf-8", "surrogatepass")


class Block:
    """One block.

    Attributes:
        refs: block tables that hold it; at 0 it is in the free list.
        hash: its key in the prefix index, None while nothing can be found in it.
        tokens: packed tokens that the keys and values in it belong to; means nothing without ``hash``.
        parent: ``serial`` of the block before it, or the scope of a first block.
        serial: number of its publication, never given twice: the identity of its whole prefix.
        prev, next: neighbours in the free list; itself when it is in none.
    """

    __slots__ = ("hash", "id", "next", "parent", "prev", "refs", "serial", "tokens")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.hash: bytes | None = None
        self.tokens = b""
        self.parent: int | bytes = 0
        self.serial = 0
        self.prev: Block = self
        self.next: Block = self


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    Attributes:
        ids: position ``p`` lies in block ``ids[p // block_size]``.
        parent: what the next block to publish has as its ``Block.parent``.
        published: leading blocks that are full, have run and went to the prefix index.
    """

    ids: list[int]
    parent: int | bytes
    published: int = 0


class BlockPool:
    """All blocks of one device cache.

    The free list is also the LRU of cached blocks: what was given back last is at its end, blocks that
    hold nothing worth finding are at its start, and ``allocate`` takes from the start. Every operation is
    O(1) per block.

    Args:
        num_blocks: blocks on the device; their ids are 0 to ``num_blocks - 1``.
        block_size: tokens per block.
        hash_key: at most 64 secret bytes, so that a client cannot construct collisions.
    """

    def __init__(self, num_blocks: int, block_size: int, hash_key: bytes) -> None:
        self.block_size = block_size
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.by_hash: dict[bytes, Block] = {}
        self.num_free = 0
        self._key = hash_key
        self._serial = 0
        self._free = Block(-1)
        for block in self.blocks:
            self._insert(block, self._free.prev)

    def extend_hashes(self, hashes: list[bytes], tokens: list[int], root: bytes) -> None:
        """Appends the hashes of those full blocks of ``tokens`` that ``hashes`` lacks."""
        known, full = len(hashes), len(tokens) // self.block_size
        if known >= full:
            return
        parent = hashes[-1] if hashes else self._digest(_ROOT, root)
        for packed in self._split(tokens, known, full):
            parent = self._digest(_BLOCK, parent + packed)
            hashes.append(parent)

    def match(self, hashes: list[bytes], tokens: list[int], root: bytes) -> list[Block]:
        """The longest cached prefix of ``tokens``, without its last token: one must always be computed.

        The blocks are not yet held; see ``share``.

        Args:
            hashes: of the full blocks of ``tokens``, from ``extend_hashes``.
            root: the scope.
        """
        found: list[Block] = []
        parent: int | bytes = root
        for digest in hashes[: (len(tokens) - 1) // self.block_size]:
            block = self.by_hash.get(digest)
            if block is None or block.parent != parent:
                break
            parent = block.serial
            found.append(block)
        for index, packed in enumerate(self._split(tokens, 0, len(found))):
            if found[index].tokens != packed:
                return found[:index]
        return found

    def allocate(self, count: int) -> list[int] | None:
        """Takes ``count`` blocks, forgetting the least recently used prefixes; None, and no change, when short."""
        if count > self.num_free:
            return None
        ids: list[int] = []
        for _ in range(count):
            block = self._free.next
            self._remove(block)
            self._forget(block)
            block.refs = 1
            ids.append(block.id)
        return ids

    def share(self, blocks: list[Block]) -> None:
        """Holds blocks that ``match`` found."""
        for block in blocks:
            if not block.refs:
                self._remove(block)
            block.refs += 1

    def free(self, ids: list[int]) -> None:
        """Gives back the blocks of a table.

        The last ones go first, so that they are evicted before their parents: a child without its parent
        cannot be found.
        """
        for block_id in reversed(ids):
            block = self.blocks[block_id]
            block.refs -= 1
            if not block.refs:
                self._insert(block, self._free if block.hash is None else self._free.prev)

    def publish(self, table: BlockTable, hashes: list[bytes], tokens: list[int], count: int) -> None:
        """Lets the first ``count`` blocks of a table be found; their step must have run.

        Where an equal block is known already, that one stays the one to find.
        """
        for index, packed in enumerate(self._split(tokens, table.published, count), table.published):
            known = self.by_hash.get(hashes[index])
            if known is None or known.parent != table.parent or known.tokens != packed:
                if known is not None:
                    self._forget(known)
                known = self.blocks[table.ids[index]]
                self._serial += 1
                known.hash, known.tokens = hashes[index], packed
                known.parent, known.serial = table.parent, self._serial
                self.by_hash[hashes[index]] = known
            table.parent = known.serial
        table.published = count

    def unpublish(self, ids: list[int]) -> None:
        """Takes blocks that cannot be trusted out of the prefix index; who holds them keeps them."""
        for block_id in ids:
            self._forget(self.blocks[block_id])

    def check_integrity(self) -> None:
        """Raises AssertionError when the lists, counts and the index contradict each other."""
        seen: set[int] = set()
        block = self._free
        while block.next is not self._free:
            assert block.next.prev is block, f"free list broken after block {block.id}"
            block = block.next
            assert block.id not in seen, f"block {block.id} is twice in the free list"
            seen.add(block.id)
        assert self._free.prev is block, "free list does not end where it should"
        assert len(seen) == self.num_free, f"{self.num_free} blocks counted as free, {len(seen)} are"
        for block in self.blocks:
            assert block.refs >= 0, f"block {block.id} was given back too often"
            assert (block.id in seen) == (block.refs == 0), f"block {block.id} has {block.refs} refs"
            assert block.hash is None or self.by_hash.get(block.hash) is block, f"block {block.id} is not indexed"
        for digest, block in self.by_hash.items():
            assert block.hash == digest, f"block {block.id} is indexed under a wrong hash"

    def _split(self, tokens: list[int], first: int, last: int) -> Iterator[bytes]:
        """The packed tokens of blocks ``first`` to ``last``."""
        packed = array("q", tokens[first * self.block_size : last * self.block_size]).tobytes()
        width = 8 * self.block_size
        return (packed[start : start + width] for start in range(0, len(packed), width))

    def _digest(self, domain: bytes, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_BYTES, key=self._key, person=domain).digest()

    def _forget(self, block: Block) -> None:
        if block.hash is not None:
            del self.by_hash[block.hash]
            block.hash = None

    def _insert(self, block: Block, after: Block) -> None:
        block.prev, block.next = after, after.next
        after.next.prev = block
        after.next = block
        self.num_free += 1

    def _remove(self, block: Block) -> None:
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = block
        self.num_free -= 1
