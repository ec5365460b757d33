"""A wheel with the CUDA library in it: TORCH_CUDA_ARCH_LIST="8.0;9.0" pip wheel ."""

from cuda_op import BiasGeluBuilder
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension

setup(
    name="cuda_op",
    version="0.1",
    packages=["cuda_op"],
    package_data={"cuda_op": ["*.cu", "*.cpp", "*.h"]},
    ext_modules=[BiasGeluBuilder(backend="cuda").builder()],
    cmdclass={"build_ext": BuildExtension},
)
