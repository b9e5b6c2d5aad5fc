"""Shared helpers: workload loading, statistics, result log."""
import json, os, resource, statistics, time

HERE = os.path.dirname(os.path.abspath(__file__))
WORKLOADS = os.path.join(HERE, "..", "..", "..", "src", "tritium", "bench", "workloads")   # the one copy, in the package

def load_c():
    return json.load(open(os.path.join(WORKLOADS, "c.json")))["requests"]

def load_rest():
    return json.load(open(os.path.join(WORKLOADS, "abde.json")))

def stat(xs, nd=2):
    xs = list(xs)
    return {"median": round(statistics.median(xs), nd), "min": round(min(xs), nd),
            "max": round(max(xs), nd), "n": len(xs)}

def peak_rss_mib():
    """Peak RSS of this process (MiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def memcpy_gbps():
    """One-thread memcpy of 128 MiB, read + write, best of 3: tells whether the host gave its usual memory bandwidth just then."""
    src, dst, best = memoryview(bytearray(1 << 27)), memoryview(bytearray(1 << 27)), 9e9
    for _ in range(4):
        t = time.perf_counter(); dst[:] = src; best = min(best, time.perf_counter() - t)
    return round(2 * (1 << 27) / best / 1e9, 1)

def record(path, engine, workload, **kw):
    row = {"engine": engine, "workload": workload, **kw, "when": time.strftime("%H:%M:%S")}
    if not workload.startswith(("small-M", "bw_", "eager")):
        row["memcpy_GBps"] = memcpy_gbps()
    print("RESULT", json.dumps(row), flush=True)
    if path:
        with open(path, "a") as f:
            f.write(json.dumps(row) + "\n")

# ---- interference: a sample counts only if the rest of the machine was quiet while it ran
_HZ = os.sysconf("SC_CLK_TCK")

def _busy():
    v = [int(x) for x in open("/proc/stat").readline().split()[1:]]
    return (v[0] + v[1] + v[2] + v[5] + v[6] + v[7]) / _HZ      # user nice system irq softirq steal

def _tree(pid):
    out, todo = [], [pid]
    while todo:
        p = todo.pop(); out.append(p)
        try:
            for t in os.listdir(f"/proc/{p}/task"):
                todo += [int(x) for x in open(f"/proc/{p}/task/{t}/children").read().split()]
        except OSError:
            pass
    return out

def _mine(pids):
    s, seen = 0.0, set()
    for root in pids:
        for p in _tree(root):
            if p in seen:
                continue
            seen.add(p)
            try:
                f = open(f"/proc/{p}/stat").read().rsplit(")", 1)[1].split()
                s += sum(int(x) for x in f[11:15]) / _HZ        # utime stime cutime cstime
            except OSError:
                pass
    return s

class Meter:
    """CPU seconds that others (and the hypervisor's steal) used while the block ran."""
    def __init__(self, pids=()): self.pids = [os.getpid(), *pids]
    def __enter__(self):
        self.b, self.m, self.t = _busy(), _mine(self.pids), time.perf_counter(); return self
    def __exit__(self, *x):
        self.wall = time.perf_counter() - self.t
        self.other = max(0.0, _busy() - self.b - (_mine(self.pids) - self.m))
    @property
    def clean(self): return self.other <= max(LIMIT * self.wall, 0.05)

# run the benches under `nice -n -20`: a neighbour then gets ~1% of a core that we want; what the meter still sees is
# neighbours on a core that we leave idle. Above LIMIT cores the sample is dropped.
LIMIT = float(os.environ.get("PEERS_OTHER_LIMIT", "0.08"))

def wait_quiet(pids=(), max_s=30.0):
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < max_s:
        with Meter(pids) as m:
            time.sleep(0.3)
        if m.other < 0.06 * m.wall + 0.011:
            return True
    return False

def measure(fn, runs=3, pids=(), max_tries=None):
    """Call fn until `runs` undisturbed results exist (or max_tries calls); returns (results, dropped)."""
    good, bad = [], []
    for _ in range(max_tries or 2 * runs + 2):
        wait_quiet(pids)
        with Meter(pids) as m:
            r = fn()
        (good if m.clean else bad).append((r, m.other / m.wall))
        if m.clean:
            print(f"  sample ({m.wall:.2f} s, others {m.other / m.wall:.2f} cores):", str(r)[:120], flush=True)
        else:
            print(f"  disturbed sample dropped: others used {m.other / m.wall:.2f} cores over {m.wall:.2f} s: {r if not isinstance(r, tuple) or len(str(r)) < 80 else '...'}", flush=True)
        if len(good) >= runs:
            break
    if len(good) < runs:                                        # never quiet enough: use the least disturbed, and say so
        print("  NOT ENOUGH QUIET SAMPLES", len(good), "of", runs, flush=True)
        bad.sort(key=lambda x: x[1]); good += bad[:runs - len(good)]
    return [r for r, _ in good], len(bad)
