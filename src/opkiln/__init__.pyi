from opkiln import comm as comm
from opkiln import errors as errors
from opkiln import io as io
from opkiln import nn as nn
from opkiln import optim as optim
from opkiln import quant as quant
from opkiln import settings as settings
from opkiln import utils as utils
from opkiln.accelerator.detect import get_accelerator as get_accelerator
from opkiln.accelerator.detect import set_accelerator as set_accelerator
from opkiln.builder import CUDAOpBuilder as CUDAOpBuilder
from opkiln.builder import OpBuilder as OpBuilder
from opkiln.builder import SYCLOpBuilder as SYCLOpBuilder
from opkiln.builder.library import library as library
from opkiln.builder.library import op as op
from opkiln.builder.registry import ALL_OPS as ALL_OPS
from opkiln.builder.registry import explain as explain
from opkiln.builder.registry import get_builder as get_builder
from opkiln.building.cubin import cubin as cubin
from opkiln.cluster.ensure import ensure as ensure
from opkiln.decision.terms import seal as seal
from opkiln.extension import load as load
from opkiln.extension import load_inline as load_inline

__version__: str

def _rebuild_quantized(*fields: object) -> object: ...
def _rebuild_fp_quantized(*fields: object) -> object: ...
def _allow_torch_to_load() -> None: ...
