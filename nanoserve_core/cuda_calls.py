"""The few CUDA runtime calls of the decode loop, made without letting go of the GIL.

torch's own calls let go of it each time and must win it back, which beside one busy Python thread
takes 5 ms each. These take microseconds and never block, so they are made through `ctypes.PyDLL`,
which keeps it; only `CudaCalls.synchronize`, which waits, lets go. (A decode step of 0.45 ms beside
one busy thread, eight steps a visit: 0.01 of the device through torch, 0.76 this way.)

It uses the runtime library that torch has loaded, and knows no tensor: addresses and handles only.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path

_NO_TIMING = 2
_NOT_READY = 600
_KINDS = {"to_device": 1, "to_host": 2}
_SIGNATURES = {
    "cudaGraphInstantiate": (c_void_p, c_void_p, c_ulonglong),
    "cudaGraphUpload": (c_void_p, c_void_p),
    "cudaGraphLaunch": (c_void_p, c_void_p),
    "cudaGraphExecDestroy": (c_void_p,),
    "cudaMemcpyAsync": (c_void_p, c_void_p, c_size_t, c_int, c_void_p),
    "cudaEventCreateWithFlags": (c_void_p, c_uint),
    "cudaEventRecord": (c_void_p, c_void_p),
    "cudaEventQuery": (c_void_p,),
    "cudaEventDestroy": (c_void_p,),
    "cudaStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cudaGetLastError": (),
}


class CudaCalls:
    """The calls. Handles are ints, as torch gives them (``stream.cuda_stream``, ``data_ptr()``).

    Each raises RuntimeError with the runtime's own words when a call fails. For any thread; the
    current device must be that of the handles.
    """

    def __init__(self, path: str | None = None) -> None:
        """``path``: the library; None finds the one this process has loaded."""
        path = path or loaded_runtime()
        held, self._released = ctypes.PyDLL(path), ctypes.CDLL(path)
        for name, signature in _SIGNATURES.items():
            function = getattr(held, name)
            function.argtypes, function.restype = signature, c_int
        self._held = held
        self._released.cudaEventSynchronize.argtypes = (c_void_p,)
        self._message = held.cudaGetErrorString
        self._message.argtypes, self._message.restype = (c_int,), c_char_p

    def instantiate(self, graph: int) -> int:
        """An executable of a captured graph."""
        executable = c_void_p()
        self._check(self._held.cudaGraphInstantiate(byref(executable), graph, 0))
        return executable.value or 0

    def upload_graph(self, executable: int, stream: int) -> None:
        """Bring it to the device, so that its first launch costs what the others do."""
        self._check(self._held.cudaGraphUpload(executable, stream))

    def launch_graph(self, executable: int, stream: int) -> None:
        """Enqueue it."""
        error = self._held.cudaGraphLaunch(executable, stream)
        if error:
            self._check(error)

    def destroy_graph(self, executable: int) -> None:
        """Give an executable back; launches still under way are finished first by the driver."""
        self._check(self._held.cudaGraphExecDestroy(executable))

    def copy_to_device(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy from page-locked memory, which must not change before it is made."""
        self._copy(target, source, nbytes, _KINDS["to_device"], stream)

    def copy_to_host(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy to page-locked memory."""
        self._copy(target, source, nbytes, _KINDS["to_host"], stream)

    def make_event(self) -> int:
        """An event without time stamps; counts as done until it is first recorded."""
        event = c_void_p()
        self._check(self._held.cudaEventCreateWithFlags(byref(event), _NO_TIMING))
        return event.value or 0

    def destroy_event(self, event: int) -> None:
        """Give an event back."""
        self._check(self._held.cudaEventDestroy(event))

    def record(self, event: int, stream: int) -> None:
        """The event is done when what ``stream`` holds now is done."""
        error = self._held.cudaEventRecord(event, stream)
        if error:
            self._check(error)

    def wait_event(self, stream: int, event: int) -> None:
        """What is enqueued from now on waits, on the device, for the event."""
        error = self._held.cudaStreamWaitEvent(stream, event, 0)
        if error:
            self._check(error)

    def is_done(self, event: int) -> bool:
        """Whether the event's last record is done; never waits."""
        error = self._held.cudaEventQuery(event)
        if error == _NOT_READY:
            self._held.cudaGetLastError()  # forgets it: torch would take it for a failed launch
            return False
        self._check(error)
        return True

    def synchronize(self, event: int) -> None:
        """Wait for the event. The only call that lets go of the GIL, and only if it is not done."""
        if not self.is_done(event):
            self._check(self._released.cudaEventSynchronize(event))

    def _copy(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        error = self._held.cudaMemcpyAsync(target, source, nbytes, kind, stream)
        if error:
            self._check(error)

    def _check(self, error: int) -> None:
        if error:
            words = self._message(error).decode()
            raise RuntimeError(
                f"the CUDA runtime answered {words!r} ({error}): expected success. An earlier "
                "kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 and enforce_eager=True."
            )


def loaded_runtime() -> str:
    """Path of the CUDA runtime library that this process has loaded.

    Raises RuntimeError when there is none: torch without CUDA, or not initialised yet.
    """
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    paths = sorted({line.split()[-1] for line in lines if "libcudart.so" in line})
    if not paths:
        raise RuntimeError(
            "no CUDA runtime library is loaded: expected the one that torch brings. Use a torch "
            "built for CUDA on Linux, or device='cpu'."
        )
    return paths[0]
