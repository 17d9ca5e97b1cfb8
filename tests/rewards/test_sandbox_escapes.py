"""A program in a sandbox reaches nothing of the machine and forges no pass: in every sandbox, as
root and as a user.
"""

import contextlib
import json
import os
import platform
import socket
import subprocess
import threading
from pathlib import Path

import pytest

from tests.rewards.sandboxes import KINDS, Sandboxes

SECRET = "the machine's secret"


@pytest.fixture(scope="module", params=KINDS)
def sandboxes(request):
    made = Sandboxes(*request.param)
    yield made
    made.close()


@pytest.fixture
def open_folder(tmp_path):
    """A folder that any user of the machine can write to, as far up as pytest made it."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.owner() == Path.home().owner() and "pytest" in str(folder):
            folder.chmod(0o777)
    return tmp_path


def attempts(sandboxes, tried, **limits):
    """Run pieces of code in one program; return what came of each: its value, or the name of its
    error.
    """
    code = """
import ctypes, json, mmap, os, resource, signal, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    return result if result != -1 else "errno " + str(ctypes.get_errno())
found = []
for piece in json.loads(input()):
    names = dict(globals())
    try:
        exec(piece, names)
        found.append(names.get("got", "done"))
    except BaseException as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
    printed = sandboxes.output(code, json.dumps(tried), **limits)
    assert printed is not None, "the program failed"
    return json.loads(printed)


REFUSED = {
    "PermissionError",
    "FileNotFoundError",
    "OSError",
    "ConnectionRefusedError",
    "MemoryError",
    "AttributeError",
}


def test_sockets_of_the_machine_are_out_of_reach(sandboxes, open_folder):
    path, name = str(open_folder / "socket"), f"siirl-{os.getpid()}-{id(sandboxes)}"
    with contextlib.ExitStack() as stack:
        by_path, abstract, packets = (
            stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            for kind in (socket.SOCK_STREAM, socket.SOCK_STREAM, socket.SOCK_DGRAM)
        )
        by_path.bind(path)
        abstract.bind(f"\0{name}")
        packets.bind(f"{path}-packets")
        for file in (path, f"{path}-packets"):
            os.chmod(file, 0o777)  # noqa: PTH101
        network = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listeners = (by_path, abstract)
        for listener in listeners:
            listener.listen()
        for listener in (*listeners, packets, network):
            listener.setblocking(False)
        pair = "pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"
        tried = [
            f"socket.socket(socket.AF_UNIX).connect({path!r})",
            f"socket.socket(socket.AF_UNIX).connect('\\0' + {name!r})",
            f"{pair}; pair[0].sendto(b'x', {path + '-packets'!r})",
            f"{pair}; pair[0].connect({path + '-packets'!r}); pair[0].send(b'x')",
            f"socket.create_connection(('127.0.0.1', {network.getsockname()[1]}), 2)",
            "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9))",
            "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
            "socket.socket(socket.AF_VSOCK)",
        ]
        assert set(attempts(sandboxes, tried)) <= REFUSED
        for listener in (*listeners, network):
            with pytest.raises(BlockingIOError):
                listener.accept()
        with pytest.raises(BlockingIOError):
            packets.recv(1)


def test_pipes_and_devices_of_the_machine_cannot_be_opened(sandboxes, open_folder):
    pipe = open_folder / "pipe"
    os.mkfifo(pipe)
    pipe.chmod(0o666)
    end = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    nodes = [
        "/dev/mem",
        "/dev/kmsg",
        "/dev/kvm",
        "/dev/fuse",
        "/dev/vda",
        "/dev/sda",
        "/dev/nvme0n1",
        "/dev/ptmx",
    ]
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            os.mknod(open_folder / "node", 0o020666, os.makedev(1, 8))
            nodes.append(str(open_folder / "node"))
    tried = [f"os.write(os.open({str(pipe)!r}, os.O_WRONLY | os.O_NONBLOCK), b'x')"]
    tried += [
        f"os.open({node!r}, {mode})"
        for node in nodes
        if node != "/dev/ptmx"
        for mode in ("os.O_RDONLY", "os.O_RDWR")
    ]
    tried += ["os.mknod('node', 0o060666, os.makedev(254, 0)); os.open('node', os.O_RDONLY)"]
    tried += ["os.mknod('other', 0o020666, os.makedev(1, 1)); os.open('other', os.O_RDONLY)"]
    if sandboxes.how == "runsc":  # its /dev/fuse is its own kernel's
        tried = [piece for piece in tried if "fuse" not in piece]
    assert set(attempts(sandboxes, tried)) <= REFUSED
    with pytest.raises(BlockingIOError):
        os.read(end, 1)
    os.close(end)


def test_files_and_environment_of_the_machine_cannot_be_read_or_changed(sandboxes, open_folder):
    kept = open_folder / "kept"
    kept.write_text(SECRET)
    kept.chmod(0o666)
    path = str(kept)
    tried = [
        f"got = open({path!r}).read()",
        f"open({path!r}, 'w')",
        f"os.remove({path!r})",
        f"os.chmod({path!r}, 0)",
        f"os.link({path!r}, 'link'); got = open('link').read()",
        f"os.symlink({path!r}, 'soft'); got = open('soft').read()",
        f"os.symlink({str(open_folder)!r}, 'dir'); open('dir/new', 'w')",
        "got = open('../' * 9 + " + repr(path) + ").read()",
        "got = open('/etc/shadow').read()",
        "got = open('/etc/passwd').read()",
        "got = os.listdir('/root/.ssh')",
        "got = os.listdir('/home')",
        "got = os.listdir('/run')",
        "got = os.listdir('/var')",
        f"got = open('/proc/{os.getpid()}/environ').read()",
        f"got = os.listdir('/proc/{os.getpid()}/root')",
        f"got = open('/proc/1/root' + {path!r}).read()",
        f"got = open('/proc/self/root' + {path!r}).read()",
        "open('/usr/bin/siirl-new', 'w')",
        "open('/dev/null/../new', 'w')",
    ]
    assert set(attempts(sandboxes, tried)) <= REFUSED | {"NotADirectoryError"}
    assert kept.read_text() == SECRET
    assert sorted(file.name for file in open_folder.iterdir()) == ["kept"]
    (environment,) = attempts(sandboxes, ["got = sorted(os.environ)"])
    assert set(environment) - {"PWD"} == {"HOME", "LC_CTYPE", "PATH", "TMPDIR"}


def test_other_processes_get_no_signal(sandboxes):
    with subprocess.Popen(["sleep", "60"], user=54321 if os.geteuid() == 0 else None) as other:
        tried = [
            f"os.kill({other.pid}, 9)",
            f"os.kill({os.getpid()}, 9)",
            "os.killpg(1, 0)",
            "os.kill(-1, 19)",
        ]
        sandboxes.output(
            f"import os\nfor kill in {tried!r}:\n    try: exec(kill)\n    except OSError: pass"
        )
        assert other.poll() is None
        other.kill()


@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="the numbers of these calls are those of x86_64"
)
def test_calls_that_reach_the_kernel_are_refused(sandboxes):
    numbers = {
        "io_uring_setup": (425, 8, 0),
        "shmget": (29, 0, 4096, 0o1600),
        "msgget": (68, 0, 0o1600),
        "semget": (64, 0, 1, 0o1600),
        "mq_open": (240, b"x", 66, 0o600, 0),
        "memfd_create": (319, b"x", 0),
        "ptrace": (101, 0, 0, 0, 0),
        "process_vm_readv": (310, 1, 0, 0, 0, 0, 0),
        "keyctl": (250, 0, -3, 0),
        "bpf": (321, 0, 0, 0),
        "userfaultfd": (323, 0),
        "perf_event_open": (298, 0, 0, -1, -1, 0),
        "mount": (165, b"x", b"/sandbox", b"tmpfs", 0, 0),
        "unshare": (272, 0x10000000),
        "setns": (308, 0, 0),
        "pivot_root": (155, b".", b"."),
        "chroot": (161, b"."),
        "open_tree": (428, -100, b"/", 1),
        "fsopen": (430, b"tmpfs", 0),
        "clone a user namespace": (56, 0x10000000 | 17, 0, 0, 0, 0),
        "clone3": (435, 0, 0),
        "x32's socket": (0x40000000 + 41, 1, 1, 0),
        "execve": (59, b"/bin/true", 0, 0),
        "prlimit of another": (302, 1, 7, 0, 0),
        "listmount, which is newer than the filter": (458, 0, 0, 0, 0),
    }
    pieces = [f"got = call('syscall', *{arguments!r})" for arguments in numbers.values()]
    found = dict(zip(numbers, attempts(sandboxes, pieces), strict=True))
    assert {
        name: result for name, result in found.items() if result not in ("errno 1", "errno 38")
    } == {}
    roots = [
        "os.setuid(0); open('/usr/new', 'w')",
        "os.setgid(0); open('/usr/new', 'w')",
        "os.setgroups([0])",
    ]
    assert set(attempts(sandboxes, roots)) <= REFUSED


def test_memory_threads_and_processes_are_limited(sandboxes):
    many = """
threading.stack_size(65536)
got = 0
try:
    for _ in range(600):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        got += 1
except RuntimeError:
    pass
"""
    tried = [
        "bytearray(2**29)",
        "mmap.mmap(-1, 2**29)",
        "mmap.mmap(-1, 2**29, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))",
        "os.fork()",
        "subprocess.run(['/bin/true'])",
        many,
    ]
    *refused, threads = attempts(sandboxes, tried, memory=2**28)
    assert set(refused) <= REFUSED | {"ValueError"}
    assert 10 < threads < 64


def test_files_are_limited_in_bytes_and_in_number(sandboxes):
    fill = """
got = 0
for place in {places!r}:
    for number in range({most}):
        try:
            file = os.open(place + "/" + str(number), os.O_WRONLY | os.O_CREAT, 0o600)
        except OSError:
            break
        try:
            {count}
        except OSError:
            pass
        os.close(file)
"""
    places = [
        "/sandbox",
        "/",
        "/tmp",
        "/var/tmp",
        "/run",
        "/dev",
        "/dev/shm",
        "/proc",
        "/sys",
        "/usr",
        "/root",
        "/etc",
    ]
    full = fill.format(places=places, most=40, count="got += os.write(file, bytes(500_000))")
    many = fill.format(places=places, most=5000, count="got += 1")
    (size,), (files,) = (attempts(sandboxes, [piece]) for piece in (full, many))
    assert 0 < size <= 2**20
    if sandboxes.how == "namespaces":  # the others' folders in memory have no such limit
        assert 0 < files <= 1024


def test_a_crash_leaves_no_core(sandboxes):
    # a limit of 0 would still start the machine's handler of cores; 1 starts none and writes none
    pieces = [
        "got = resource.getrlimit(resource.RLIMIT_CORE)",
        "resource.setrlimit(resource.RLIMIT_CORE, (2**30, 2**30))",
    ]
    limit, raised = attempts(sandboxes, pieces)
    assert (limit, raised) == ([1, 1], "ValueError")
    assert sandboxes.output("import os; os.abort()") is None


FORGERIES = {
    "looking for the caller": """
import gc, sys
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and 'token' in value:
            print(value['token'])
    frame = frame.f_back
found = [item for item in gc.get_objects() if isinstance(item, dict) and ('test' in item or 'token' in item)]
def f(x):
    return next((item['test'] for item in found if 'test' in item), None)
""",
    "leaving at once": "import os; os._exit(0)",
    "leaving when it is called": "def f(x):\n    import os; os._exit(0)",
    "leaving by an exception": "def f(x): raise SystemExit(0)",
    "leaving at exit": "import atexit, os; atexit.register(os._exit, 0)\ndef f(x): raise SystemExit",
    "leaving as what was refused": "import os; os._exit(97)",
    "leaving as what cannot be used": "import os; os._exit(96)",
    "an answer that equals everything": "class Same:\n    def __eq__(self, x): return True\ndef f(x): return Same()",
    "an answer that calculates": """
class Same:
    def __sub__(self, other): return 0
    __rsub__ = __add__ = __abs__ = __sub__
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __eq__ = __lt__
    def __contains__(self, other): return True
def f(x): return Same()
""",
    "a number that equals everything": "class Same(int):\n    def __eq__(self, x): return 1\ndef f(x): return Same(1)",
    "other builtins": """
import builtins, json, operator
builtins.AssertionError = builtins.compile = builtins.isinstance = None
operator.eq = lambda *a: True
def abs(x): return 0
all = any = sorted = len = lambda *a, **k: True
def f(x): return 7
""",
    "writing messages to every file": """
import json, os, struct
for message in ({"value": 2, "changed": {}}, {"names": {"f": 2}}, {"value": True, "changed": {"0": [2]}}, "x", {}):
    data = json.dumps(message).encode()
    for file in range(3, 64):
        try: os.write(file, struct.pack("<Q", len(data)) + data)
        except OSError: pass
def f(x): return 7
""",
    "an endless message": """
import os, struct
for file in range(3, 64):
    try: os.write(file, struct.pack("<Q", 2**62))
    except OSError: pass
def f(x): return bytes(10**6)
""",
    "nesting without end": "def f(x):\n    r = []\n    for _ in range(10**5): r = [r]\n    return r",
    "killing what watches it": """
import os, signal
for target in (os.getppid(), 1, 0, -1):
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
        try:
            if target > 0 and target != os.getpid(): os.kill(target, number)
        except OSError: pass
os._exit(0)
""",
    "errors that stand for others": "class AssertionError(BaseException): pass\ndef f(x): raise AssertionError",
    "a thread that answers": """
import os, threading, json, struct
def spam():
    data = json.dumps({"value": 2, "changed": {}}).encode()
    while True:
        for file in range(3, 12):
            try: os.write(file, data)
            except OSError: pass
threading.Thread(target=spam, daemon=True).start()
def f(x): return 7
""",
}


EQUAL = "assert f(1) == 2"
TESTS = (EQUAL, "assert abs(f(1) - 2) < 1e-6", "assert 2 in [f(1)] and all([False])")


def forged_in():
    """Kinds of sandboxes, and the tests that a pass is forged of there: the program that holds a test
    is the same in all of them, so namespaces have each test, and the others one. Who starts runsc is
    nothing to the program in it, and each takes a second there.
    """
    for kind in KINDS:
        ours = "namespaces" in kind.id
        for test in TESTS[:1] if "runsc" in kind.id else TESTS:
            left = kind.id == "runsc-user" or (test != EQUAL and not ours)
            marks = [*kind.marks, *[pytest.mark.sweep] * left]
            yield pytest.param(*kind.values, test, id=f"{kind.id}-{test}", marks=marks)


@pytest.mark.parametrize(("sandboxes", "test"), forged_in(), indirect=["sandboxes"], scope="module")
@pytest.mark.parametrize("how", FORGERIES)
def test_a_pass_cannot_be_forged(sandboxes, how, test):
    assert not sandboxes.passes(FORGERIES[how], test, seconds=3.0)


def test_root_that_may_not_mount_runs_programs_in_namespaces_as_another_user():
    Sandboxes("namespaces", "user").close()  # skips where the kernel refuses namespaces to users
    try:
        made = Sandboxes("namespaces", "container")
    except pytest.skip.Exception as error:
        pytest.fail(str(error))
    tried = [
        "got = os.getuid()",
        "got = os.listdir('/home')",
        "os.setuid(0); open('/usr/new', 'w')",
    ]
    user, *others = attempts(made, tried)
    made.close()
    assert user > 65535
    assert set(others) <= REFUSED


def test_programs_at_the_same_time_do_not_meet(sandboxes):
    """Two sandboxes share neither processes, files nor sockets."""
    code = (
        "import os, time; open('mine', 'w').close(); time.sleep(1); print(os.listdir(), "
        "os.path.exists('/proc/4'))"
    )
    other = Sandboxes(sandboxes.how, "user")
    printed = []
    thread = threading.Thread(target=lambda: printed.append(other.output(code)))
    thread.start()
    printed.append(sandboxes.output(code))
    thread.join()
    other.close()
    assert set(printed) == {"['mine'] False\n"}
