"""A platform of verl for CPUs with gloo, by verl's plug-in point (``PlatformRegistry``).

VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu VERL_ENGINE_DEVICE=cuda
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

import torch
import torch.distributed as dist
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


class _Device(types.ModuleType):
    """What verl asks of ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        if hasattr(torch.cpu, name):
            return getattr(torch.cpu, name)
        if name == "mem_get_info":
            return lambda *_: (0, 0)
        if name.startswith(("max_memory", "memory_")):
            return lambda *_: 0
        if name in ("empty_cache", "ipc_collect", "reset_peak_memory_stats", "set_device"):
            return lambda *_: None
        raise AttributeError(name)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _Device("cpu_device")

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, index):
        pass

    def synchronize(self, index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, message):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def ray_resource_options(self, count):
        return {"num_cpus": count}

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None


_init = dist.init_process_group


def _of_gloo(backend: str | None = None, **options: Any) -> None:
    _init("gloo", **options)  # verl would name it twice, for the CPU and for the device


dist.init_process_group = _of_gloo
