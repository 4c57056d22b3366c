"""Mistakes as they are made in engines, put into the real engine while its modules are imported.

Called by `sitecustomize` in one process of a patient. Each takes the module that was just imported.
Invariant: the mistake is in the engine's own path, at a step or a start that was going on.
"""

import ctypes
import fcntl
import os
import re
import socket
import threading
import time


def _at(number, then):
    """Calls `then` at the `number`th call of the wrapped method, before it."""

    def wrap(method):
        calls = 0

        def wrapped(self, *arguments, **named):
            nonlocal calls
            calls += 1
            if calls == number:
                then(self)
            return method(self, *arguments, **named)

        return wrapped

    return wrap


def skip_plan(module, number):
    """engine.channel: a follower loses one plan, and waits for the next one."""
    receive = module.PlanReceiver.receive
    calls = 0

    def receive_again(self):
        nonlocal calls
        calls += 1
        plan = receive(self)
        return receive(self) if calls == number else plan

    module.PlanReceiver.receive = receive_again


def other_collective(module, number):
    """ops.collectives: one rank takes the other branch at its `number`th sum."""
    all_reduce = module.Group.all_reduce
    calls = 0

    def reduce_or_share(self, name, tensor):
        nonlocal calls
        calls += 1
        if calls == number:
            self.gather_columns("expert-map", tensor, [tensor.shape[-1]] * self.size)
            return tensor
        return all_reduce(self, name, tensor)

    module.Group.all_reduce = reduce_or_share


def slow_collective(module, seconds):
    """ops.collectives: each takes so much longer."""
    run = module.Group._run

    def slow_run(self, name, call):
        def call_late(*arguments):
            time.sleep(seconds)
            return call(*arguments)

        return run(self, name, call_late)

    module.Group._run = slow_run


def two_locks(module, number):
    """engine.core: the step takes the queue's lock and then the statistics', another thread the other way."""
    queue_lock, statistics_lock = threading.Lock(), threading.Lock()
    both_have_one = threading.Barrier(2)

    def write_statistics():
        with statistics_lock:
            both_have_one.wait()
            with queue_lock:
                return

    def take_both(self):
        threading.Thread(target=write_statistics, name="statistics", daemon=True).start()
        with queue_lock:
            both_have_one.wait()
            with statistics_lock:
                return

    module.EngineCore.step = _at(number, take_both)(module.EngineCore.step)


def wait_in_c(module, number):
    """engine.core: an extension waits for an event that never comes, and keeps the interpreter's lock."""
    waits = ctypes.PyDLL(None)
    read_fd, write_fd = os.pipe()
    buffer = ctypes.create_string_buffer(1)

    def wait(self):
        waits.read(read_fd, buffer, 1)
        os.close(write_fd)

    module.EngineCore.step = _at(number, wait)(module.EngineCore.step)


def long_match(module, number):
    """engine.core: a pattern with an exponential search, in C code that never gives the interpreter back."""

    def match(self):
        re.match(r"(\w+\s?)+$", "a" * 64 + "!")

    module.EngineCore.step = _at(number, match)(module.EngineCore.step)


def stand_still(module, where):
    """engine.worker.startup: this function waits for an answer that never comes."""

    def wait(*_, **__):
        asked, _answers = socket.socketpair()
        asked.recv(1)

    setattr(module, where, wait)


def plan_nothing(module, number):
    """engine.scheduler.scheduler: work is there and no plan comes of it, from the `number`th plan on."""
    plan = module.Scheduler.plan
    calls = 0

    def plan_or_not(self):
        nonlocal calls
        calls += 1
        return plan(self) if calls < number else None

    module.Scheduler.plan = plan_or_not


def lose_requests(module, number):
    """engine.core: a request that came is forgotten, from the `number`th on."""
    handle = module.EngineCore.handle
    calls = 0

    def handle_or_forget(self, message):
        nonlocal calls
        calls += 1
        if calls < number:
            handle(self, message)

    module.EngineCore.handle = handle_or_forget


def other_place(module):
    """ops.collectives: this rank was given another rendezvous than the rest."""
    join = module.join

    def join_elsewhere(group, rendezvous, *others):
        return join(group, rendezvous.with_name(f"{rendezvous.name}-2"), *others)

    module.join = join_elsewhere


def far_store(module, host, port):
    """ops.collectives: ranks meet at an address, as they do on several machines."""

    def store(path, size):
        from torch.distributed import TCPStore

        return TCPStore(host, port, size, is_master=False)

    module.FileStore = store


def build_first(module, source, name):
    """engine.startup: operators are compiled when they are first needed."""
    pick = module.pick_backend

    def build_and_pick(*arguments):
        from torch.utils import cpp_extension

        cpp_extension.load(name, [source])
        return pick(*arguments)

    module.pick_backend = build_and_pick


def lock_first(module, path, polls):
    """engine.startup: a cache that processes share is locked before it is read."""
    pick = module.pick_backend

    def lock_and_pick(*arguments):
        if polls:
            from filelock import FileLock

            with FileLock(path):
                return pick(*arguments)
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return pick(*arguments)

    module.pick_backend = lock_and_pick


def long_tables(module, seconds):
    """engine.startup: tables of a large model are computed, in pure Python, without a word."""
    pick = module.pick_backend

    def compute_and_pick(*arguments):
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            sum(position * position for position in range(10_000))
        return pick(*arguments)

    module.pick_backend = compute_and_pick


def many_files(module, number):
    """engine.core: every step opens something and forgets it, from the `number`th on."""
    kept = []

    def leak(self):
        while True:
            kept.append(socket.socket())

    module.EngineCore.step = _at(number, leak)(module.EngineCore.step)
