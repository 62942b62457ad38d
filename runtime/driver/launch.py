"""Parameter blocks and launches."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codegen.plan import Epilogue, Param, Plan, Prologue, param_offsets, params_size
from codegen.problem import BlockSize
from runtime.compile.compiler import Compiled
from runtime.driver import library, process
from runtime.driver.api import call, driver
from runtime.driver.tensor_map import MapEncoder
from runtime.errors import DeviceError

# Parameter type -> its struct format.
_FORMATS = {"tensor_map": "128s", "pointer": "<Q", "i64": "<q", "i32": "<i", "f32": "<f"}
_launching: dict[int, threading.Lock] = {}  # by device


@dataclass(frozen=True)
class ParameterLayout:
    """Offsets of the fields of a kernel's Params struct."""

    offsets: Mapping[str, int]
    types: Mapping[str, str]
    size: int

    @classmethod
    def of(cls, params: tuple[Param, ...]) -> ParameterLayout:
        """Lay out a struct as C++ does."""
        offsets = {param.name: offset for param, offset in zip(params, param_offsets(params), strict=True)}
        return cls(offsets, {param.name: param.type for param in params}, params_size(params))

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The struct as bytes with its numbers; addresses and tensor maps are zero."""
        numbers = {name for name, kind in self.types.items() if kind in ("i32", "i64", "f32")}
        if numbers != set(values):
            raise AssertionError(f"parameters {sorted(numbers ^ set(values))} differ between struct and call")
        block = bytearray(self.size)
        for name, value in values.items():
            struct.pack_into(_FORMATS[self.types[name]], block, self.offsets[name], value)
        return bytes(block)


@dataclass(slots=True)
class MapPlace:
    """The 128 bytes of a tensor map in a parameter block, rewritten when the tensor's address changes.

    Attributes:
        name: name of the tensor.
        encoder: encodes the tensor map for an address.
        place: the bytes.
        address: address that the bytes encode; None before the first call.
    """

    name: str
    encoder: MapEncoder
    place: memoryview
    address: int | None = None

    def write(self, address: int) -> None:
        """Write the tensor map of a tensor at ``address``."""
        self.place[:] = self.encoder.at(address)
        self.address = address


@dataclass(frozen=True)
class Signature:
    """A checked call without its addresses.

    Attributes:
        device: CUDA device number.
        block: parameter block of every call of this signature. Its numbers are fixed; each launch writes its addresses
            and tensor maps.
        pointers: (tensor name, its 8 bytes of the block) of each pointer parameter.
        maps: place of each tensor map.
        grid: thread blocks.
        extra: data that the operator keeps for later calls of this signature.
        arguments: the driver's list of kernel arguments: the block's address.
        list_address: address of that list.
        lock: lock that a launch holds; see ``_lock_of``.
        prologue_grid: thread blocks of the plan's prologue, if it has one.
        epilogue_grid: thread blocks of the plan's epilogue, if it has one; 0: it is not launched.
        config: launch configuration of the driver, built once because building costs more than a launch; each launch
            sets its stream.
    """

    device: int
    block: ctypes.Array[ctypes.c_char]
    pointers: tuple[tuple[str, ctypes.c_uint64], ...]
    maps: tuple[MapPlace, ...]
    grid: int
    extra: Any
    arguments: ctypes.Array[ctypes.c_void_p]
    list_address: int
    lock: threading.Lock
    config: Any
    prologue_grid: int = 0
    epilogue_grid: int = 0


class LoadedKernel:
    """A kernel loaded in the driver, for any device of its architecture.

    The constructor and the methods need the device's primary context current (``runtime.driver.context``).
    """

    def __init__(self, compiled: Compiled) -> None:
        process.claim()
        cuda = driver()
        self.plan: Plan = compiled.plan
        self.layout = ParameterLayout.of(compiled.plan.params)
        prologue = compiled.plan.prologue
        self.library = library.load(compiled.code, self.plan.shared_bytes, prologue.shared_bytes if prologue else 0)
        self._kernel = self._find(compiled.plan.stem)
        self._function = cuda.CUfunction(int(self._kernel))
        self._prologue_kernel = self._prologue = None
        if prologue is not None:
            self._prologue_kernel = self._find(prologue.symbol)
            self._prologue = cuda.CUfunction(int(self._prologue_kernel))
        epilogue = compiled.plan.epilogue
        self._epilogue = None if epilogue is None else cuda.CUfunction(int(self._find(epilogue.symbol)))
        self._launch = cuda.cuLaunchKernel  # of prologues and epilogues
        self._launch_by = cuda.cuLaunchKernelEx
        self._sm_counts: dict[int, int] = {}

    def _find(self, symbol: str) -> Any:
        """A kernel of the library, after a check of its parameter size."""
        cuda = driver()
        kernel = call(cuda.cuLibraryGetKernel, self.library.handle, symbol.encode())
        _, size = call(cuda.cuKernelGetParamInfo, kernel, 0)
        if size != self.layout.size:
            raise AssertionError(f"Params has {size} bytes in {symbol}, {self.layout.size} bytes in the runtime")
        return kernel

    def sm_count(self, device: int) -> int:
        """Number of multiprocessors. The first call prepares the kernel for the device."""
        if device not in self._sm_counts:
            cuda = driver()
            handle = call(cuda.cuDeviceGet, device)
            attribute = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            call(cuda.cuKernelSetAttribute, attribute, self.plan.shared_bytes, self._kernel, handle)
            if self.plan.prologue is not None:
                shared_bytes = self.plan.prologue.shared_bytes
                call(cuda.cuKernelSetAttribute, attribute, shared_bytes, self._prologue_kernel, handle)
            count = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            self._sm_counts[device] = call(cuda.cuDeviceGetAttribute, count, handle)
        return self._sm_counts[device]

    def slots(self, device: int) -> int:
        """Number of thread blocks that run concurrently."""
        return self.sm_count(device) * self.plan.ctas_per_sm

    def signature(
        self,
        device: int,
        tiles: int,
        values: Mapping[str, int | float],
        tensors: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
        extra: Any = None,
        *,
        prologue_grid: int = 0,
        epilogue_grid: int = 0,
        size: BlockSize | None = None,
    ) -> Signature:
        """Prepare calls of one signature.

        Args:
            device: CUDA device number.
            tiles: tiles of work, or parts of tiles if these are more. The grid has at most as many thread blocks as run
                concurrently, in whole clusters.
            values: every number parameter by name.
            tensors: (shape, strides in elements) of each tensor that has a tensor map, by the map's name less ``_map``.
            extra: data to keep with the signature.
            prologue_grid: thread blocks of the plan's prologue, if it has one.
            epilogue_grid: thread blocks of the plan's epilogue, if it has one.
            size: threads of a thread block; None for the plan's size.
        """
        slots = self.slots(device)  # prepares the kernel, which any grid needs
        offsets, types = self.layout.offsets, self.layout.types
        block = ctypes.create_string_buffer(self.layout.pack(values), self.layout.size)
        view = memoryview(block).cast("B")
        maps = []
        for name, how in self.plan.tensor_maps.items():
            shape, strides = tensors[name.removesuffix("_map")]
            encoder = MapEncoder(self.plan.spec.dtype, tuple(reversed(shape)), tuple(reversed(strides[:-1])), how)
            maps.append(MapPlace(name.removesuffix("_map"), encoder, view[offsets[name] : offsets[name] + 128]))
        grid = self.plan.thread_blocks(tiles, slots)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        return Signature(
            device=device,
            block=block,
            pointers=tuple(
                (name, ctypes.c_uint64.from_buffer(block, offsets[name]))
                for name, kind in types.items()
                if kind == "pointer"
            ),
            maps=tuple(maps),
            grid=grid,
            extra=extra,
            arguments=arguments,
            list_address=ctypes.addressof(arguments),
            lock=_lock_of(device),
            prologue_grid=prologue_grid,
            epilogue_grid=epilogue_grid,
            config=self._config(grid, size or BlockSize(self.plan.threads, self.plan.shared_bytes)),
        )

    def _config(self, grid: int, size: BlockSize) -> Any:
        """Launch configuration. If the prologue allows it, the kernel may start before the prologue ends."""
        cuda = driver()
        attributes = []
        if self.plan.prologue is not None and self.plan.prologue.overlaps:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            attributes.append(attribute)
        config = cuda.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = size.threads, 1, 1
        config.sharedMemBytes = size.shared_bytes
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    def launch(self, signature: Signature, addresses: Mapping[str, int], stream: int, *, prologue: bool = True) -> None:
        """Launch on ``stream``.

        Args:
            signature: signature of the call.
            addresses: device address of every tensor by name; 0 for a tensor that is not given.
            stream: CUDA stream.
            prologue: whether to launch the plan's prologue first, if it has one.
        """
        arguments = signature.list_address
        with signature.lock:
            for tensor_map in signature.maps:
                address = addresses[tensor_map.name]
                if address != tensor_map.address:
                    tensor_map.write(address)
            for name, pointer in signature.pointers:
                pointer.value = addresses[name]
            if prologue and self.plan.prologue is not None:
                self._launch_prologue(self.plan.prologue, signature.prologue_grid, arguments, stream)
            signature.config.hStream = stream
            (status,) = self._launch_by(signature.config, self._function, arguments, 0)
            if status == 0 and self.plan.epilogue is not None and signature.epilogue_grid:
                self._launch_epilogue(self.plan.epilogue, signature.epilogue_grid, arguments, stream)
        if status != 0:
            raise _launch_error(self.plan.stem, status)

    def launch_prologue(self, device: int, grid: int, addresses: Mapping[str, int], stream: int) -> None:
        """Launch the plan's prologue by itself. It must read only the pointers among its parameters.

        Args:
            device: CUDA device number.
            grid: thread blocks.
            addresses: device addresses of its inputs and outputs; other parameters are 0.
            stream: CUDA stream.
        """
        assert self.plan.prologue is not None
        self.sm_count(device)  # prepares the kernel
        block = ctypes.create_string_buffer(self.layout.size)
        for name, address in addresses.items():
            ctypes.c_uint64.from_buffer(block, self.layout.offsets[name]).value = address
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        with _lock_of(device):
            self._launch_prologue(self.plan.prologue, grid, ctypes.addressof(arguments), stream)

    def _launch_prologue(self, prologue: Prologue, grid: int, arguments: int, stream: int) -> None:
        (status,) = self._launch(
            self._prologue, grid, 1, 1, prologue.threads, 1, 1, prologue.shared_bytes, stream, arguments, 0
        )
        if status != 0:
            raise _launch_error(prologue.symbol, status)

    def _launch_epilogue(self, epilogue: Epilogue, grid: int, arguments: int, stream: int) -> None:
        (status,) = self._launch(self._epilogue, grid, 1, 1, epilogue.threads, 1, 1, 0, stream, arguments, 0)
        if status != 0:
            raise _launch_error(epilogue.symbol, status)


def _lock_of(device: int) -> threading.Lock:
    """Lock that a launch holds while it writes its parameters and submits its kernels.

    All calls of a signature share its block, and no other launch may come between a prologue and its kernel. Each
    device has its own lock, because the driver blocks while a device's queue is full.
    """
    return _launching.get(device) or _launching.setdefault(device, threading.Lock())


def _launch_error(symbol: str, status: Any) -> DeviceError:
    """Error for a launch that the driver refused."""
    why = f": {process.FORKED}" if process.was_forked() else ""
    return DeviceError(f"launch of {symbol} failed: {getattr(status, 'name', status)}{why}")
