"""DeepSpeed from PyPI, as it is, on opkiln: each test is a program of its own.

They need an interpreter that has DeepSpeed: this one, or that of an environment beside it, which
``make test-deepspeed`` and ``make bench`` make. Elsewhere they are skipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from deepspeed_programs import PYTHON, Programs

import opkiln
from opkiln.compat.deepspeed.table import MODULES

if PYTHON is None:
    pytest.skip("there is no DeepSpeed here: make test-deepspeed", allow_module_level=True)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for all: each op is compiled once."""
    return tmp_path_factory.mktemp("store") / "cache"


@pytest.fixture
def programs(store: Path, tmp_path: Path) -> Programs:
    return Programs(store, tmp_path)


def _report(text: str) -> dict[str, str]:
    """The report's lines of ops: compatible or not, by name."""
    plain = text.replace("\033[92m", "").replace("\033[93m", "").replace("\033[0m", "")
    found = [line.split() for line in plain.splitlines() if line.endswith(("[OKAY]", "[NO]"))]
    return {words[0]: words[-1] for words in found if words[0] != "ninja"}


def test_the_report_says_who_serves_each_function_and_one_of_deepspeeds_own_works(
    programs: Programs,
) -> None:
    done = programs.run("-m", "opkiln", "report", "--deepspeed", "--json")
    assert done.returncode == 0, done.stderr
    served = {each["op"]: each for each in json.loads(done.stdout)}
    assert served["cpu_adam"]["ops"][0] == "create_adam"
    assert "zenflow_adam_ctrl_size" in served["cpu_adam"]["engine"]
    assert served["fused_adam"]["engine"] == []
    program = """
    import opkiln.compat.deepspeed
    opkiln.compat.deepspeed.install()
    from deepspeed.ops.op_builder import CPUAdamBuilder
    module = CPUAdamBuilder().load()
    answer = [hasattr(module, "nothing"), module.zenflow_adam_ctrl_size() > 0]
    """
    assert programs.answer(program) == [False, True]


TRAINING = """
    import opkiln.compat.deepspeed as on_opkiln
    on_opkiln.install()
    import torch
    {front_end}

    def train(make, reload=False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 4))
        x, y = torch.randn(128, 32), torch.randn(128, 4)
        optimizer, losses = make(net.parameters()), []
        for step in range(60):
            if reload and step == 30:
                saved = optimizer.state_dict()
                optimizer = make(net.parameters())
                optimizer.load_state_dict(saved)
            loss = torch.nn.functional.mse_loss(net(x), y)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            losses.append(loss.item())
        return losses

    answer = {{"ours": train(lambda p: {ours}), "reloaded": train(lambda p: {ours}, True),
               "theirs": train(lambda p: {theirs}),
               "origin": {{n: s.origin for n, s in on_opkiln.served().items()}}}}
"""
LION = """
    from deepspeed.ops.lion import DeepSpeedCPULion

    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr, betas, weight_decay):
            super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                (b1, b2), lr = group["betas"], group["lr"]
                for p in group["params"]:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.mul_(1 - lr * group["weight_decay"])
                    p.sub_((m * b1 + p.grad * (1 - b1)).sign(), alpha=lr)
                    m.mul_(b2).add_(p.grad, alpha=1 - b2)
"""


@pytest.mark.parametrize(
    ("op", "front_end", "ours", "theirs"),
    [("cpu_adam", "from deepspeed.ops.adam import DeepSpeedCPUAdam",
      "DeepSpeedCPUAdam(p, lr=1e-2, weight_decay=0.1)",
      "torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)"),
     ("cpu_adagrad", "from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad",
      "DeepSpeedCPUAdagrad(p, lr=1e-2)", "torch.optim.Adagrad(p, lr=1e-2)"),
     ("cpu_lion", LION, "DeepSpeedCPULion(p, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)",
      "Lion(p, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)"),
     ("fused_adam", "from deepspeed.ops.adam import FusedAdam",
      "FusedAdam(p, lr=1e-2, weight_decay=0.1)",
      "torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)")],
    ids=["cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam"],
)  # fmt: skip
def test_an_optimizer_trains_on_opkilns_kernel(
    programs: Programs, op: str, front_end: str, ours: str, theirs: str
) -> None:
    code = TRAINING.format(front_end=front_end.strip(), ours=ours, theirs=theirs)
    found = programs.answer(code)
    assert found["origin"] == {op: "ops"}
    losses = found["ours"]
    assert losses[-1] < 0.7 * losses[0]
    assert losses == pytest.approx(found["theirs"], rel=2e-3)
    assert found["reloaded"] == pytest.approx(losses, rel=2e-3)


def test_every_op_that_the_report_calls_compatible_loads(programs: Programs) -> None:
    """Two of them have no sources that could be built here: one stands for ops that there are not,
    and one says, when it is asked for its flags, that oneCCL is not installed."""
    reported = programs.run("-c", "from deepspeed.env_report import cli_main; cli_main()").stdout
    compatible = {op for op, verdict in _report(reported).items() if verdict == "[OKAY]"}
    assert compatible >= {"cpu_adam", "cpu_adagrad", "cpu_lion", "fused_adam", "pin_memory"}
    found = programs.answer(
        f"""
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        from deepspeed.ops.op_builder.all_ops import ALL_OPS
        answer = {{}}
        for name in {sorted(compatible)!r}:
            try:
                ALL_OPS[name].load()
                answer[name] = on_opkiln.served()[name].origin
            except ValueError as error:
                answer[name] = str(error)
        """
    )
    assert "not been implemented" in found.pop("deepspeed_not_implemented")
    if "CCL_ROOT" not in os.environ:
        assert "Didn't find CCL_ROOT" in found.pop("deepspeed_ccl_comm", "Didn't find CCL_ROOT")
    assert found == {name: "ops" if name in MODULES else "engine" for name in found}


def test_random_ltd_trains_a_layer_on_opkilns_kernels(programs: Programs) -> None:
    """DeepSpeed has the front end for GPUs alone: here it is given the module by hand."""
    found = programs.answer(
        """
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        import torch
        from deepspeed.ops.op_builder.random_ltd import RandomLTDBuilder
        from deepspeed.ops.random_ltd import dropping_utils as theirs
        theirs.random_ltd_module = RandomLTDBuilder().load()
        from opkiln.nn import random_ltd as ours

        mask = torch.randn(2, 1, 12, 12)
        torch.manual_seed(0)
        indices, masks = theirs.bert_sample_tokens(5, 12, 2, 3, "cpu", mask)
        torch.manual_seed(0)
        again, ours_masks = ours.bert_sample_tokens(5, 12, 2, 3, "cpu", mask)
        answer = [torch.equal(indices, again), torch.equal(torch.stack(masks), ours_masks)]
        for batch_first in (True, False):
            layer = torch.nn.Linear(8, 8)
            x = torch.randn(2, 12, 8) if batch_first else torch.randn(12, 2, 8)
            x.requires_grad_()

            def by_deepspeed():
                all_tokens, part = theirs.GatherTokens.apply(x, indices[1], batch_first)
                return theirs.ScatterTokens.apply(
                    all_tokens, layer(part), indices[1], batch_first)

            def by_opkiln():
                part = layer(ours.token_gather(x, indices[1], batch_first))
                return ours.token_scatter(x, part, indices[1], batch_first)

            one, two = by_deepspeed(), by_opkiln()
            answer.append(torch.equal(one, two))
            if batch_first:
                grads = [torch.autograd.grad(out.sin().sum(), (x, layer.weight))
                         for out in (one, two)]
                answer += [torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads)]
        answer.append(on_opkiln.served()["random_ltd"].origin)
        """
    )
    assert found == [True] * 6 + ["ops"]


def test_spatial_inference_adds_on_opkilns_kernels(programs: Programs) -> None:
    found = programs.answer(
        """
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        import torch
        from deepspeed.ops.op_builder.spatial_inference import SpatialInferenceBuilder
        from deepspeed.ops.transformer.inference import bias_add as theirs
        theirs.spatial_cuda_module = SpatialInferenceBuilder().load()
        x, other = torch.randn(2, 2, 8, 3, 3).to(memory_format=torch.contiguous_format)
        x, other = (t.to(memory_format=torch.channels_last) for t in (x, other))
        bias, more = torch.randn(2, 8)
        column = bias.view(-1, 1, 1)
        answer = [
            torch.equal(theirs.nhwc_bias_add(x, bias), x + column),
            torch.equal(theirs.nhwc_bias_add(x, bias, other), x + column + other),
            torch.equal(theirs.nhwc_bias_add(x, bias, other, more),
                        (x + column) + (other + more.view(-1, 1, 1))),
            on_opkiln.served()["spatial_inference"].origin,
        ]
        """
    )
    assert found == [True, True, True, "ops"]


def test_pinned_memory_of_deepspeeds_own_module_works(programs: Programs) -> None:
    found = programs.answer(
        """
        import torch, opkiln.compat.deepspeed.auto
        from deepspeed.ops.op_builder import PinMemoryBuilder
        handle = PinMemoryBuilder().load().pin_handle()
        locked = handle.new_cpu_locked_tensor(100, torch.zeros(1))
        locked.fill_(3.0)
        answer = [locked.sum().item(), handle.is_pinned(locked), handle.is_pinned(torch.zeros(4)),
                  handle.free_cpu_locked_tensor(locked)]
        """
    )
    assert found == [300.0, True, False, True]


def test_a_program_that_knows_nothing_of_opkiln_runs_on_it(programs: Programs) -> None:
    (programs.folder / "train.py").write_text(
        "import torch\n"
        "from deepspeed.ops.adam import DeepSpeedCPUAdam\n"
        "p = torch.nn.Parameter(torch.ones(100))\n"
        "optimizer = DeepSpeedCPUAdam([p], lr=0.1)\n"
        "p.grad = torch.ones(100); optimizer.step()\n"
        "print('MODULE', type(optimizer.ds_opt_adam).__module__, p[0].item())\n"
    )
    done = programs.run("-m", "opkiln", "run", str(PYTHON), "train.py")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("MODULE")]
    _, module, value = line.split()
    assert module == "opkiln.compat.deepspeed.modules"
    assert float(value) == pytest.approx(0.9)


def test_the_report_says_what_it_said(programs: Programs) -> None:
    report = ("-c", "from deepspeed.env_report import cli_main; cli_main()")
    alone = programs.run(*report)
    beside = programs.run("-m", "opkiln", "run", str(PYTHON), *report)
    assert alone.returncode == beside.returncode == 0, beside.stderr[-3000:]
    # opkiln's op needs no libaio.
    assert {**_report(alone.stdout), "async_io": "[OKAY]"} == _report(beside.stdout)
    assert len(_report(alone.stdout)) >= 8
    assert "opkiln" not in alone.stdout


def test_the_report_says_what_opkiln_serves(programs: Programs) -> None:
    report = ("-c", "from deepspeed.env_report import main; main(hide_operator_status=True)")
    run = ("-m", "opkiln", "run", str(PYTHON), *report)
    told = programs.run(*run, OPKILN_DEEPSPEED="cpu_lion=engine,cpu_adagrad=off").stdout
    own, built, left = (
        re.search(f"^{words}: (.*)", told, re.MULTILINE)[1].split(", ")  # type: ignore[index]
        for words in ("opkiln's own kernels", "DeepSpeed's sources, built by opkiln",
                      "left to DeepSpeed")
    )  # fmt: skip
    assert f"opkiln {opkiln.__version__} loads DeepSpeed's ops in this process:" in told
    assert "cpu_adam" in own
    assert "cpu_lion" in built
    assert left == ["cpu_adagrad"]


def test_what_was_exchanged_is_put_back(programs: Programs) -> None:
    found = programs.answer(
        """
        import deepspeed.ops.op_builder.builder as module
        def functions():
            owners = (module, module.OpBuilder, module.CUDAOpBuilder)
            return [dict(vars(owner)) for owner in owners]
        before = functions()
        import opkiln.compat.deepspeed as on_opkiln
        untouched = functions() == before
        on_opkiln.install(); on_opkiln.install()
        changed = functions() != before
        on_opkiln.remove()
        answer = [untouched, changed, functions() == before]
        """
    )
    assert found == [True, True, True]


def test_nothing_of_deepspeed_or_torch_changes_on_disk(programs: Programs) -> None:
    code = "import deepspeed, torch; answer = [deepspeed.__file__, torch.__file__]"
    folders = [Path(file).parent for file in programs.answer(code)]

    def signature() -> str:
        digest = hashlib.sha256()
        for folder in folders:
            for path in sorted(folder.rglob("*")):
                if "__pycache__" not in path.parts and path.is_file():
                    found = path.stat()
                    digest.update(f"{path} {found.st_size} {found.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    before = signature()
    programs.answer(
        """
        import opkiln.compat.deepspeed.auto
        from deepspeed.ops.op_builder import CPUAdamBuilder
        answer = CPUAdamBuilder().load().__name__
        """
    )
    assert signature() == before
    assert not (programs.folder / "extensions").exists()


@pytest.mark.parametrize("setting", ["off", "cpu_adam=off"])
def test_an_op_can_be_left_to_deepspeed(programs: Programs, setting: str) -> None:
    found = programs.answer(
        """
        import torch.utils.cpp_extension as extensions
        asked = []
        extensions.load = lambda name, **rest: asked.append(name) or "DeepSpeed's"
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        from deepspeed.ops.op_builder import CPUAdamBuilder
        answer = [CPUAdamBuilder().load(), asked, on_opkiln.served()["cpu_adam"].origin]
        """,
        OPKILN_DEEPSPEED=setting,
    )
    assert found == ["DeepSpeed's", ["cpu_adam"], "deepspeed"]


def test_another_packages_builder_of_the_same_name_is_its_own(programs: Programs) -> None:
    (programs.folder / "mine.cpp").write_text(
        "#include <Python.h>\n"
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "cpu_adam", "mine", -1, nullptr};\n'
        "PyMODINIT_FUNC PyInit_cpu_adam() { return PyModule_Create(&module); }\n"
    )
    found = programs.answer(
        f"""
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        from deepspeed.ops.op_builder.builder import OpBuilder

        class Mine(OpBuilder):
            NAME = "cpu_adam"
            def __init__(self): super().__init__(name=self.NAME)
            def absolute_name(self): return "mine.cpu_adam_op"
            def sources(self): return [{str(programs.folder / "mine.cpp")!r}]

        answer = [Mine().load().__doc__, on_opkiln.served()["cpu_adam"].origin]
        """
    )
    assert found == ["mine", "engine"]


def test_builders_for_gpus_take_9_0a_and_leave_the_environment_alone(programs: Programs) -> None:
    found = programs.answer(
        """
        import os
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        from opkiln.compat.deepspeed import engine
        from deepspeed.ops.op_builder.fused_adam import FusedAdamBuilder
        from deepspeed.ops.op_builder.fp_quantizer import FPQuantizerBuilder
        before = dict(os.environ)
        answer = {}
        for kind in (FusedAdamBuilder, FPQuantizerBuilder):
            builder = kind()
            flags = builder.compute_capability_args()
            spec = engine.op_of(kind()).spec
            answer[builder.name] = {
                "flags": flags, "sources": spec.sources, "include_dirs": spec.include_dirs,
                "device_args": spec.device_args, "backend": spec.backend, "ldflags": spec.ldflags,
            }
        answer["environment"] = dict(os.environ) == before
        """,
        TORCH_CUDA_ARCH_LIST="7.5;9.0a",
    )
    assert found.pop("environment")
    adam, quantizer = found["fused_adam"], found["fp_quantizer"]
    assert adam["flags"] == [
        "-gencode=arch=compute_75,code=sm_75", "-gencode=arch=compute_90a,code=sm_90a",
    ]  # fmt: skip
    assert quantizer["flags"] == ["-gencode=arch=compute_90a,code=sm_90a"], "as it filters"
    assert adam["backend"] == "cuda"
    assert adam["sources"] == [
        "csrc/adam/fused_adam_frontend.cpp", "csrc/adam/multi_tensor_adam.cu",
    ]  # fmt: skip
    assert "csrc/includes" in adam["include_dirs"]
    assert "-DBF16_AVAILABLE" not in adam["device_args"], "7.5 has none"
    assert "-DBF16_AVAILABLE" in quantizer["device_args"]
    assert quantizer["ldflags"] == ["-lcurand"]
    for each in found.values():
        owned = ("--threads", "-gencode", "-arch")
        assert not [flag for flag in each["device_args"] if flag.startswith(owned)]


def test_the_builder_of_deepcompile_finds_the_toolkit(programs: Programs) -> None:
    found = programs.answer(
        """
        import opkiln.compat.deepspeed as on_opkiln
        on_opkiln.install()
        import sys, torch
        torch.cuda.is_available = lambda: True
        from opkiln.compat.deepspeed import engine
        from deepspeed.ops.op_builder.dc import DeepCompileBuilder
        imported = "torch.utils.cpp_extension" in sys.modules
        from opkiln.compat.torch import paths
        spec = engine.op_of(DeepCompileBuilder()).spec
        answer = [imported, spec.include_dirs, paths.cuda_toolkit()]
        """
    )
    imported, include_dirs, toolkit = found
    assert not imported
    assert include_dirs == ["csrc/includes", "csrc/compile", f"{toolkit}/include"]
