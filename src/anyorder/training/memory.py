"""Keep freed memory in the process: by default every large buffer is fresh from the kernel, page by page, each step."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_freed_memory() -> None:
    """Tell glibc to serve large buffers from its heap and to give nothing back; elsewhere do nothing."""
    if platform.libc_ver()[0] == "glibc":
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, 2**30)
        library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
