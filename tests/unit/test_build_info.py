"""What a build says of its CUDA kernels."""

from __future__ import annotations

from lmcache_rs import _native


def test_a_build_has_kernels_or_says_why_not() -> None:
    info = _native.build_info()
    assert isinstance(info["cuda_kernels"], bool)
    if info["cuda_kernels"]:
        assert str(info["nvcc"]).count(".") >= 1
        assert "90" in str(info["cuda_architectures"]).split()
        # The bytes themselves are in this very module, not only the word that they are.
        assert int(info["cuda_kernel_bytes"]) > 100_000
    else:
        assert info["cuda_absent_because"]
        assert "nvcc" not in info
