"""How ranks meet: the store that they share, what they agree on, and who of them is missing."""

import hashlib
import json
import os
import socket
import sys
import threading
import time
from contextlib import contextmanager, suppress
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import torch
import torch.distributed as dist

from pipeline.command_line import reject
from pipeline.ending import GRACE, end_process, end_sibling, launcher_lives

SIGN_OF_LIFE = 0.25  # seconds between two
SILENCE = 2.0  # seconds without any, after which a rank does not live


class Disagreement(Exception):
    """Ranks were started in different ways; the text names one, what differs, and both values."""


def meet(rank, num_ranks, timeout):
    """The store through which ranks find each other. It does not wait for other ranks' arrival."""
    if num_ranks == 1:  # on Windows torch has no HashStore, and is built without libuv
        alone = getattr(dist, "HashStore", None)
        return alone() if alone else dist.TCPStore("127.0.0.1", 0, is_master=True, use_libuv=False)
    if "SLURM_STEP_NODELIST" in os.environ:
        from pipeline.slurm import NoMeetingPoint, set_meeting_point

        try:
            set_meeting_point()
        except NoMeetingPoint as error:
            reject(str(error))
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ValueError(f"environment variable {name} expected, but not set")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("WORLD_SIZE", str(num_ranks))
    keeper, limit = "rank 0", timeout
    if launcher_keeps_the_store():  # from before its ranks: without it, torchrun itself is gone
        keeper, limit = "torchrun", GRACE
    is_keeper = keeper == "rank 0" and rank == 0
    try:
        if not is_keeper:
            wait_for_listener(address, port, limit)
        store = open_store(address, port, is_keeper, limit)
    except (OSError, RuntimeError) as error:
        place, reason = f"{address}:{port}", str(error).splitlines()[0]
        waited = f"waited {limit:g} s for {keeper} to start" if not is_keeper else "cannot listen"
        end_process(f"rank {rank} {waited} at {place} ({reason})")
    store.set_timeout(timedelta(seconds=timeout))
    return store


def wait_for_listener(address, port, timeout):
    """Until somebody listens there. Raises OSError after `timeout` seconds.

    torch's store would wait, too, but print the stack of its C++ at each try.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((address, port), timeout=GRACE).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def launcher_keeps_the_store():
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_store(address, port, is_keeper, timeout):
    """Keep the store or connect to it. At a loopback address nobody outside can reach the job.

    By itself torch's store listens on all interfaces, and does what anybody tells it.
    """
    options = {"use_libuv": os.environ.get("USE_LIBUV", "1") == "1"}
    if is_loopback(address):
        stay_on_loopback()
        if is_keeper and sys.platform != "win32":
            options["master_listen_fd"], port = listen(address, port)
    limit = timedelta(seconds=timeout)
    return dist.TCPStore(
        address, port, is_master=is_keeper, timeout=limit, wait_for_workers=False, **options
    )


def is_loopback(address):
    """Whether all that `address` leads to is this machine alone."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(address, None)}
    except OSError:
        return False
    return all(ip_address(place.partition("%")[0]).is_loopback for place in found)


def stay_on_loopback():
    """Let the messages, too, use no other interface, unless the user has named one."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for name in names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def listen(address, port):
    """A socket that listens at this address only: its descriptor, and its port."""
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
        listening.listen(1024)
        port = listening.getsockname()[1]
        return listening.detach(), port


def agree(store, rank, num_ranks, settings, timeout, progress=lambda: None):
    """Wait until all ranks are there. Returns the process ids of those on this machine, by rank.

    `settings` are compared by name, beside the number of ranks, torch and the code; `progress` is
    called again and again. Raises Disagreement, with the same words on all ranks, for the first one
    that was started otherwise than rank 0.
    """
    mine = {"the number of ranks": num_ranks, "torch": torch.__version__, "the code": version()}
    place = socket.gethostname(), os.getpid()
    store.set(f"settings/{rank}", json.dumps([*place, {**mine, **settings}]))
    found, deadline = {}, time.monotonic() + timeout
    while len(found) < num_ranks:
        for other in set(range(num_ranks)) - set(found):
            if store.check([f"settings/{other}"]):
                found[other] = json.loads(store.get(f"settings/{other}"))
                progress()
        missing = sorted(set(range(num_ranks)) - set(found))
        if len({each[2]["the number of ranks"] for each in found.values()}) > 1:
            break  # some of those who are missing will never come
        if missing and time.monotonic() > deadline:
            end_process(f"rank {rank} waited {timeout:g} s for {ranks_text(missing)} to start")
        progress()
        time.sleep(0.02 if missing else 0)
    first = found.get(0, found[rank])[2]
    for other in sorted(found):
        if found[other][2] != first:
            raise Disagreement(difference_text(other, found[other][2], first))
    return {other: each[1] for other, each in found.items() if each[0] == place[0]}


def difference_text(rank, settings, others):
    """The sentence about `rank`, whose settings differ from those of rank 0."""
    names = [n for n in {**others, **settings} if settings.get(n) != others.get(n)]
    parts = [f"{name} is {settings.get(name)} there and {others.get(name)} here" for name in names]
    more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return (
        f"rank {rank} was started otherwise than rank 0 (here): {', '.join(parts[:3])}{more}; give "
        "all ranks the same command, text, torch and copy of the course"
    )


def leave_together(store, rank, num_ranks):
    """Let rank 0, which may keep the store, be the last to go, and wait for it at most GRACE."""
    with suppress(RuntimeError):
        store.add("leaving", 1)
        deadline = time.monotonic() + GRACE
        while rank == 0 and store.add("leaving", 0) < num_ranks and time.monotonic() < deadline:
            time.sleep(0.02)


def version():
    """What tells this code from another: the first digits of the SHA-256 of core and script."""
    here = Path(__file__)
    files = sorted(here.parent.glob("*.py")) if here.parent.name == "pipeline" else [here]
    files += [path for path in [Path(sys.argv[0])] if path.is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def ranks_text(ranks):
    """As "rank 2" or "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


class Presence(threading.Thread):
    """Ends this rank when its launcher is gone and, while it joins, when another rank is.

    A thread that gives signs of life through the store: a process that is stopped gives none.
    """

    def __init__(self, rank, num_ranks, timeout):
        super().__init__(daemon=True, name="presence")
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self.parent = os.getppid()
        self.store = None  # while this rank joins
        self.processes = {}  # rank -> process id, of the ranks on this machine
        self.progressed = time.monotonic()
        self.looking = threading.Lock()

    @contextmanager
    def joining(self, store):
        """Around all that joins this rank to the others, through `store`."""
        if self.num_ranks == 1:
            yield
            return
        self.progress()
        # A connection of its own for who gives signs and for who asks: one that waits is taken.
        self.signs, self.asked, joined = (
            dist.PrefixStore("presence", store.clone()) for _ in range(3)
        )
        self.signs.set(str(self.rank), "0")
        self.store = store
        try:
            yield
        except RuntimeError as error:  # torch's classes and gloo's have no other one in common
            reason = str(error).splitlines()[0].split("] ", 1)[-1]
            silent = self.find_silent()
            who = ranks_text(silent) if silent else "the other ranks"
            self.end(f"rank {self.rank} could not join {who} ({reason})", silent)
        except Disagreement as error:
            self.store = None
            leave_together(store, self.rank, self.num_ranks)
            reject(str(error))
        finally:
            self.store = None
        joined.set(f"joined/{self.rank}", "")

    def progress(self):
        """Note that this rank does not wait, or no longer."""
        self.progressed = time.monotonic()

    def waits_too_long(self):
        return self.store is not None and time.monotonic() - self.progressed > self.timeout

    def run(self):
        """The thread: look a few times a second whether the others are still there."""
        count, gives_signs = 0, True
        while launcher_lives(self.parent):
            if self.store is not None and gives_signs:
                count += 1
                try:
                    self.signs.set(str(self.rank), str(count))
                except RuntimeError:
                    gives_signs = False  # the store is gone, as this rank is about to find out
            if self.waits_too_long() and not self.looking.locked():
                threading.Thread(target=self.look_at_others, daemon=True).start()
            time.sleep(SIGN_OF_LIFE)
        os._exit(1)

    def look_at_others(self):
        """End this rank and those that are silent. A thread of its own: the signs have to go on."""
        with self.looking:
            silent = self.find_silent()
            if silent and self.waits_too_long():
                who = ranks_text(silent)
                waited = f"rank {self.rank} waited {self.timeout:g} s for {who} to join"
                self.end(f"{waited}: {who} stopped answering", silent)

    def end(self, sentence, silent):
        """End this rank, and those of this machine that do not hear a launcher's request to end."""
        siblings = [self.processes[rank] for rank in silent if rank in self.processes]

        def leave():
            if 0 in (self.rank, *silent):  # the store may be there, and others are asking it
                time.sleep(SILENCE)
            for process_id in siblings:
                end_sibling(process_id)

        end_process(sentence, leave)

    def find_silent(self):
        """The ranks that have not joined, and give no sign of life for SILENCE seconds."""
        before, after, answered = {}, {}, threading.Event()

        def ask():  # in a thread: a store that does not answer holds up who asks
            with suppress(RuntimeError):
                before.update(self.signs_in(self.asked))
                time.sleep(SILENCE)
                after.update(self.signs_in(self.asked))
                answered.set()

        threading.Thread(target=ask, daemon=True).start()
        if answered.wait(SILENCE + 1.0):
            return [rank for rank in after if rank != self.rank and after[rank] == before.get(rank)]
        return [] if launcher_keeps_the_store() or self.rank == 0 else [0]

    def signs_in(self, store):
        """What the ranks that have begun to join, and have not joined, gave as their last sign."""
        joining = [
            rank
            for rank in range(self.num_ranks)
            if store.check([str(rank)]) and not store.check([f"joined/{rank}"])
        ]
        return {rank: store.get(str(rank)) for rank in joining}
