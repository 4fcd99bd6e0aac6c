"""Workers of a Ray cluster."""

from __future__ import annotations

import logging
import os
import pickle
import socket
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvalloc.engine.contract import MEASURED_WITH, Advance, Failed, ModelFacts, Work
from kvalloc.errors import (
    InputError,
    KVAllocError,
    SampleError,
    by_interface,
    naming_flags,
    one_line,
    option,
    require,
)
from kvalloc.files import provenance

if TYPE_CHECKING:
    from kvalloc.models.loading import ModelSource

_LOG = logging.getLogger(__name__)

DEATHS = 2
"""Workers that may die with an item before it fails."""

CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.5
"""Seconds between two questions for the workers' progress."""

_OBJECT_STORE_BYTES = 256 * 2**20
"""Object store of a cluster started here: it holds samples and their curves."""

_DIED = object()

_LOCAL_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
"""Settings of such a cluster, unless the user has set them: no usage is reported, and workers have
the priority of this process."""

_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
"""First bytes of a connection to a cluster's head, which speaks gRPC: a preface, empty settings."""


class Host:
    """A worker process's model, and the work of one job.

    `flags`: messages name options as flags.
    """

    def __init__(self, source: dict[str, Any], threads: int, *, flags: bool) -> None:
        from kvalloc.models.loading import ModelSource

        self._threads, self._flags = threads, flags
        loaded = ModelSource(**source).load()
        self._model, self.facts = loaded.model, ModelFacts.of(loaded.model, loaded.model_id)
        self._work: tuple[int, Work] | None = None
        self.steps = 0

    def do(self, number: int, references: list[Any], pickled: bytes) -> bytes:
        """Return an item's result and its steps, pickled.

        The result may be a `Failed`, or the error that ends the job.
        """
        import ray
        import torch

        torch.set_num_threads(self._threads)  # of this thread, whichever Ray has taken
        self.steps, item = 0, pickle.loads(pickled)
        if self._work is None or self._work[0] != number:
            self._work = (number, pickle.loads(ray.get(references)[0]))
        try:
            with naming_flags() if self._flags else nullcontext():
                result: Any = self._work[1](self._model, item, self._advance)
        except Exception as error:
            _LOG.info("an item failed", exc_info=True)
            result = _as_result(error)
        return pickle.dumps((result, self.steps))

    def _advance(self, steps: int) -> None:
        self.steps += steps


def _as_result(error: Exception) -> Failed | KVAllocError:
    """Return an item's error in a class that the driver knows."""
    try:
        failed = Failed.of(error)
    except KVAllocError as ends:
        return ends
    except Exception:
        os._exit(1)  # the device is broken for this process: another one takes the item
    return Failed(error=SampleError(failed.reason))


def _actor_class() -> type:
    """Return the class that Ray runs, sent by value: machines may have another kvalloc."""

    class Worker:
        def __init__(self) -> None:
            self.host: Host | None = None

        def begin(self, versions: dict[str, str], *arguments: Any, flags: bool) -> Any:
            """Return the model's facts, differing versions, or an error."""
            from importlib.metadata import PackageNotFoundError, version

            installed = {}
            for name in versions:
                try:
                    installed[name] = version(name)
                except PackageNotFoundError:
                    installed[name] = "source"
            if installed != versions:
                return installed
            from kvalloc.engine.ray import Host
            from kvalloc.errors import KVAllocError

            try:
                self.host = Host(*arguments, flags=flags)
            except KVAllocError as error:
                return error
            return self.host.facts

        def do(self, *arguments: Any) -> bytes:
            assert self.host is not None  # it was begun
            return self.host.do(*arguments)

        def steps(self) -> int:
            return 0 if self.host is None else self.host.steps

    return Worker


@dataclass(kw_only=True)
class _Worker:
    """A worker in the driver's view; a successor inherits its slot."""

    slot: int
    actor: Any
    waiting: Any = None
    item: int | None = None
    ready: bool = False
    lost: int = 0


@dataclass(kw_only=True)
class RayEngine:
    """A model in the workers of a Ray cluster, used in a ``with``.

    Results are bit-identical to this process's if threads, device and versions are the same.

    Attributes
    ----------
    source : ModelSource
        A path has to exist on each machine.
    address : str, optional
        HOST:PORT or ``auto``; by default ``RAY_ADDRESS``, else a cluster started here, and shut
        down again. A connected process uses its cluster.
    workers : int, optional
        By default one for each GPU, else as CPUs allow.
    threads : int, optional
        CPU threads of each; by default torch's number here, or `workers`' share.
    log : bool
        Let Ray and workers write to stderr.
    """

    source: ModelSource
    address: str | None = None
    workers: int | None = None
    threads: int | None = None
    log: bool = False
    _ray: Any = field(default=None, init=False)
    _workers: list[_Worker] = field(default_factory=list, init=False)
    _facts: ModelFacts | None = field(default=None, init=False)
    _works: int = field(default=0, init=False)
    _work: tuple[Work, Any] | None = field(default=None, init=False)
    _began: bool = field(default=False, init=False)
    _gpus: int = field(default=0, init=False)
    _polled_at: float = field(default=0.0, init=False)

    def __enter__(self) -> RayEngine:
        """Connect, and return once a worker has loaded the model.

        Raises
        ------
        MissingDependencyError
            If Ray is not installed.
        InputError
            If the cluster is unreachable or too small, its machines differ in versions or model, or
            none can load it.
        """
        require("spreading work over workers", "ray", extra="ray")
        import ray

        self._ray = ray
        if os.path.exists(self.source.source):  # workers may have another current folder
            self.source = replace(self.source, source=os.path.abspath(self.source.source))
        try:
            self._began = self._connected()
            self._count()
            self._workers = [self._begun(slot) for slot in range(self.workers or 1)]
            while not any(worker.ready for worker in self._workers):  # others join when they are
                self._next()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if not self._ray.is_initialized():
            return
        for worker in self._workers:
            with suppress(Exception):
                self._ray.kill(worker.actor)
        self._workers.clear()
        if self._began:
            self._ray.shutdown()

    def facts(self, model_id: str | None = None) -> ModelFacts:
        """See `Engine.facts`."""
        assert self._facts is not None  # since it was entered
        if model_id is None:
            return self._facts
        return replace(self._facts, shape=replace(self._facts.shape, model_id=model_id))

    def run(
        self, work: Work, items: Mapping[int, Any], advance: Advance
    ) -> Iterator[tuple[int, Any]]:
        """See `Engine.run`. An item of a dead worker goes to another, until `DEATHS` have died."""
        if self._work is None or self._work[0] is not work:
            self._works += 1
            self._work = (work, self._ray.put(self._ray.cloudpickle.dumps(work)))
        left, deaths, counted = deque(items), Counter[int](), Counter[int]()
        try:
            while left or any(worker.item is not None for worker in self._workers):
                self._hand_out(left, items)
                worker = self._next()
                self._count_steps(counted, advance)
                if worker is None:
                    continue
                number, result = self._taken(worker, counted, advance)
                if result is _DIED:
                    deaths[number] += 1
                    _LOG.info("a worker died of item %d", number)
                    if deaths[number] < DEATHS:
                        left.appendleft(number)
                        continue
                    result = Failed(error=SampleError(f"it killed its worker {DEATHS} times"))
                elif isinstance(result, KVAllocError):
                    raise result
                self._hand_out(left, items)  # before anybody looks at this one
                yield number, result
        finally:
            for worker in [one for one in self._workers if one.item is not None]:
                self._replace(worker)  # nobody waits for its result

    def _connected(self) -> bool:
        """Connect; return whether the cluster was started here."""
        ray = self._ray
        if ray.is_initialized():
            return False
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        level = logging.INFO if self.log else logging.ERROR
        options: dict[str, Any] = {"log_to_driver": self.log, "logging_level": level}
        if address == "local":
            for name, value in _LOCAL_SETTINGS.items():
                os.environ.setdefault(name, value)
            options |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
        elif address != "auto":
            _check_reachable(address)
        try:
            ray.init(address, **options)
        except (Exception, SystemExit) as error:
            raise InputError(
                f"the Ray cluster at {address} cannot be used: {one_line(error)}; start one with "
                f"'ray start --head', set RAY_AUTH_TOKEN where it wants a token, or leave out "
                f"{option('address')}"
            ) from error
        return True

    def _count(self) -> None:
        import torch

        resources = self._ray.cluster_resources()
        cpus, gpus = (int(resources.get(kind, 0)) for kind in ("CPU", "GPU"))
        device = self.source.device
        self._gpus = 1 if gpus and (device is None or device.startswith("cuda")) else 0
        if self.threads is None:
            self.threads = max(1, cpus // self.workers if self.workers else torch.get_num_threads())
            self.threads = min(self.threads, max(1, cpus))
        if self.workers is None:
            self.workers = gpus if self._gpus else max(1, cpus // self.threads)
        if self._gpus and device is None:
            self.source = replace(self.source, device="cuda")
        if self.workers < 1 or self.threads < 1:
            raise InputError(f"{self.workers} workers of {self.threads} threads can do nothing")
        if self.workers * self.threads > cpus or self.workers * self._gpus > gpus:
            much = f"{self.workers} workers of {self.threads} CPU threads"
            much += " and a GPU each" if self._gpus else ""
            has = f"{cpus} CPUs and {gpus} GPUs"
            raise InputError(
                f"{much} are more than the cluster has, {has}; ask for fewer with "
                f"{option('workers')} or {option('threads')}"
            )

    def _begun(self, slot: int, lost: int = 0) -> _Worker:
        actor = self._ray.remote(_actor_class()).options(
            num_cpus=self.threads,
            num_gpus=self._gpus,
            max_concurrency=2,  # the second one says how far the first is
        )
        handle = actor.remote()
        flags = bool(by_interface(python="", flags="yes"))
        begun = handle.begin.remote(_versions(), vars(self.source), self.threads, flags=flags)
        return _Worker(slot=slot, actor=handle, waiting=begun, lost=lost)

    def _replace(self, worker: _Worker, lost: int = 0) -> None:
        with suppress(Exception):
            self._ray.kill(worker.actor)
        self._workers[worker.slot] = self._begun(worker.slot, lost)

    def _hand_out(self, left: deque[int], items: Mapping[int, Any]) -> None:
        assert self._work is not None  # only `run` comes here
        for worker in [one for one in self._workers if one.ready and one.waiting is None]:
            if left:
                reference = [self._work[1]]  # in a list: read where it is not known yet
                worker.item = left.popleft()
                worker.waiting = worker.actor.do.remote(
                    self._works, reference, self._ray.cloudpickle.dumps(items[worker.item])
                )

    def _next(self) -> _Worker | None:
        """Return a worker with a finished item; None after a while, or after a load."""
        known = {one.waiting: one for one in self._workers if one.waiting is not None}
        ready, _ = self._ray.wait([*known], timeout=POLL_SECONDS)
        if not ready:
            if not any(worker.ready for worker in self._workers):
                self._check_room()
            return None
        worker = known[ready[0]]
        if worker.item is None:
            self._loaded(worker)
            return None
        return worker

    def _loaded(self, worker: _Worker) -> None:
        exceptions = self._ray.exceptions
        try:
            result = self._ray.get(worker.waiting)
        except exceptions.RayTaskError as error:
            why = one_line(error.cause)
            raise InputError(f"a worker of the Ray cluster cannot begin: {why}") from None
        except exceptions.RayError as error:
            if worker.lost + 1 >= DEATHS:
                raise InputError(
                    f"workers die while they load {self.source.source} ({one_line(error, 80)}); "
                    f"give them more memory, or ask for fewer with {option('workers')}"
                ) from None
            self._replace(worker, worker.lost + 1)
            return
        if isinstance(result, KVAllocError):
            raise result
        here = _versions()
        if isinstance(result, dict):
            name = next(name for name in here if result[name] != here[name])
            raise InputError(
                f"a worker of the Ray cluster has {name} {result[name]}, and this process "
                f"{here[name]}; install the same on all of its machines"
            )
        self._facts = self._facts or result
        first, other = self._facts.record(), result.record()
        if differ := [name for name in first if first[name] != other[name]]:
            raise InputError(
                f"workers of the Ray cluster loaded different models: {differ[0]} is "
                f"{one_line(first[differ[0]], 60)} and {one_line(other[differ[0]], 60)}; give "
                f"{self.source.source} the same files on all machines"
            )
        worker.ready, worker.waiting = True, None
        _LOG.info("worker %d of %s has its model", worker.slot + 1, self.workers)

    def _taken(self, worker: _Worker, counted: Counter[int], advance: Advance) -> tuple[int, Any]:
        """Return a worker's item and result, `_DIED` from a dead one."""
        assert worker.item is not None  # checked by the caller
        number, exceptions = worker.item, self._ray.exceptions
        try:
            result, steps = pickle.loads(self._ray.get(worker.waiting))
            advance(max(0, steps - counted[number]))
        except exceptions.RayTaskError as error:
            result = Failed(error=SampleError(one_line(error.cause)))
        except exceptions.RayError:
            self._replace(worker)
            return number, _DIED
        worker.item = worker.waiting = None
        return number, result

    def _count_steps(self, counted: Counter[int], advance: Advance) -> None:
        """Report finished steps; repeated ones count once."""
        if time.monotonic() - self._polled_at < POLL_SECONDS:
            return
        busy = {one.actor.steps.remote(): one for one in self._workers if one.item is not None}
        if busy:
            ready, _ = self._ray.wait([*busy], num_returns=len(busy), timeout=POLL_SECONDS)
            for reference in ready:
                with suppress(self._ray.exceptions.RayError):
                    item, steps = busy[reference].item, self._ray.get(reference)
                    assert item is not None  # that is what they were chosen by
                    advance(max(0, steps - counted[item]))
                    counted[item] = max(counted[item], steps)
        self._polled_at = time.monotonic()

    def _check_room(self) -> None:
        assert self.threads is not None  # counted on entering
        resources = self._ray.cluster_resources()
        if resources.get("CPU", 0) < self.threads or resources.get("GPU", 0) < self._gpus:
            raise InputError(
                "no machine of the Ray cluster that is left has room for a worker; what was "
                "finished is kept"
            )


def _versions() -> dict[str, str]:
    versions: dict[str, str] = provenance(*MEASURED_WITH)["versions"]
    return versions


def _check_reachable(address: str) -> None:
    """Refuse an address without a cluster's head: Ray itself takes minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "//" in address:
        raise InputError(
            f"{option('address')} {address} is no address of a Ray cluster; give HOST:PORT, or auto"
        )
    answer = b""
    try:
        with socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS) as connection:
            connection.sendall(_HTTP2_HELLO)
            connection.settimeout(CONNECT_SECONDS)
            answer = connection.recv(9)
        why = "what answers there is no Ray cluster"
    except (OSError, OverflowError) as error:
        why = one_line(getattr(error, "strerror", None) or error)
    if answer[3:4] != b"\4":  # a frame with settings
        raise InputError(
            f"the Ray cluster at {address} cannot be reached: {why}; start one with 'ray start "
            f"--head', or leave out {option('address')} for one on this machine"
        )
