"""The ``opkiln`` command: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import os
import re
import signal
import sys
import warnings
from functools import cache
from importlib import import_module

import click

from opkiln import __version__, settings
from opkiln.base.trust import usable_by_owner
from opkiln.cli import options, output, run
from opkiln.errors import OpkilnError, StoreError, explain_error

# The place of each command. Its module is imported when it runs, or when --help needs its help.
_COMMANDS = {
    "run": "main:run_command",
    "ninja": "main:ninja_command",
    "build": "build:command",
    "plan": "explain:plan_command",
    "explain": "explain:explain_command",
    "arch": "arch:command",
    "check": "explain:check_command",
    "report": "report:report_command",
    "doctor": "report:doctor_command",
    "cache": "cache:command",
    "lock": "carry:lock_command",
    "tuned": "cache:tuned_command",
    "new": "new:command",
    "demo": "demo:command",
    "completion": "main:completion_command",
}


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return _command(cmd_name) if cmd_name in _COMMANDS else None


@cache
def _command(name: str) -> click.Command:
    module, variable = _COMMANDS[name].split(":")
    command: click.Command = getattr(import_module(f"opkiln.cli.{module}"), variable)
    return output.equip(command)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 no (check, arch, demo, doctor), 2 usage, 3 no compiler, 4 build "
    "failed, 5 store, 6 the op cannot run here, 7 compiling is switched off, 8 warnings only "
    "(doctor), 130 interrupted.",
)
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Compile, cache and inspect native PyTorch operators.

    Ops are built at their first use. These commands build them earlier, and show what is built,
    what would be built, and why. Data goes to standard output, progress to standard error.
    """
    if ctx.invoked_subcommand == "doctor":
        return  # it reports invalid settings itself
    for setting in settings.table():
        setting.resolve()  # an invalid value is an error now, not when it is used


output.equip(cli)


@click.command(
    "run",
    short_help="Run a program with its PyTorch extensions built by opkiln.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@options.file_option(
    "--record",
    help="Note in FILE which ops and which modules of tvm-ffi, FlashInfer and SGLang are used, for "
    "`opkiln build --recorded FILE` and `opkiln.ensure`.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND…")
def run_command(record: str | None, command: tuple[str, ...]) -> None:
    """Run COMMAND, an unmodified program, with opkiln in place of torch.utils.cpp_extension and of
    DeepSpeed's op builders.

    \b
        opkiln run python train.py
        opkiln run train.py
        opkiln run pip install --no-build-isolation ./some-extension

    One line on standard error says that opkiln took over, and opkiln then shows what it builds; -q
    silences both. This holds for every Python that COMMAND starts, and nothing on disk changes.
    COMMAND is looked up as in a shell; this Python runs a FILE.py that is not executable.
    OPKILN_PATCH_TORCH=1 does the same for a Python that has opkiln installed. OPKILN_DEEPSPEED
    chooses what DeepSpeed's builders load. With OPKILN_ENSURE=OP,... the ranks of a distributed
    program agree on these ops when it calls init_process_group, and what it loads later is
    compiled by one rank.
    """
    program, words = run.find(list(command))
    if line := run.announcement(list(command)):
        output.say(line)
    sys.stdout.flush()
    sys.stderr.flush()
    given = run.environment() | output.child_variables()
    if record is not None:
        given["OPKILN_RECORD"] = os.path.abspath(record)
    os.execve(program, words, given)  # noqa: S606 (argv as the user gave it, no shell)


@click.command(
    "ninja",
    short_help="Run ninja, with compiles and links from the store.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[ARGUMENT]…")
def ninja_command(arguments: tuple[str, ...]) -> int:
    """Run the ninja that is on PATH, with the same arguments, output and exit status.

    \b
        opkiln ninja -C build
        opkiln run python setup.py build_ext

    Each command that is a compiler, a linker or an archiver is taken from the store if all that it
    read is as it was; otherwise it runs, and is kept. All other commands run as they are. What is
    out of date, ninja decides as ever. Under `opkiln run`, every `ninja` that a program starts from
    PATH is this one.
    """
    from opkiln.compat.ninja import front

    return front.start(list(arguments))


@click.command("completion", short_help="Print a completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_command(shell: str) -> None:
    """Print a completion script for SHELL.

    \b
    bash: opkiln completion bash > ~/.local/share/bash-completion/completions/opkiln
    zsh:  opkiln completion zsh > ~/.zfunc/_opkiln      (with ~/.zfunc in $fpath)
    fish: opkiln completion fish > ~/.config/fish/completions/opkiln.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    # The base class: that of bash would first start a bash to find out its version.
    output.data(ShellComplete.source(kind(cli, {}, "opkiln", "_OPKILN_COMPLETE")))


def main() -> None:
    """Run the command line and exit with its code."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    if sys.argv[1:2] == ["run"]:  # the user's program has the umask that the user chose
        sys.exit(_run(sys.argv[1:]))
    # If our parent ignores it, so do we, and the exit status of every program would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with usable_by_owner():
        sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        code = cli.main(arguments, prog_name="opkiln", standalone_mode=False)
        if sys.stdout is not None:  # None: it was closed before we started
            sys.stdout.flush()
    except (OpkilnError, FileNotFoundError, UnicodeEncodeError) as error:
        clear = error if isinstance(error, OpkilnError) else explain_error(error)
        if clear is None:
            raise
        output.say_failure(clear)
        return clear.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        output.say_always(error.format_message())
        return error.exit_code
    except click.ClickException as error:
        hint = _suggest_command(error) if isinstance(error, click.UsageError) else ""
        output.say_error(error.format_message(), hint)
        return error.exit_code
    except click.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            _leave_interrupted()
        output.say_always("\nnothing was done")
        return output.FOUND
    except BrokenPipeError:
        output.discard()  # the reader has closed the pipe
        return output.FOUND
    except OSError as error:
        # Our output is on a full disk or a closed file, or a command did not expect this error.
        output.discard()
        reason = error.strerror or str(error)
        output.say_error(f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason)
        return StoreError.exit_code
    return code if isinstance(code, int) else 0


def _suggest_command(error: click.UsageError) -> str:
    """A command to copy: the one that was probably meant, else the one that shows the help."""
    from difflib import get_close_matches

    context = error.ctx
    path = context.command_path if context else "opkiln"
    typed = re.match("No such command '(.+)'", error.message)
    if context and isinstance(context.command, click.Group) and typed:
        known = context.command.list_commands(context)
        for meant in get_close_matches(typed[1], known, n=1):
            return f"{path} {meant}"
    return f"{path} --help"


def _leave_interrupted() -> None:
    # The process ends at once, without the interpreter's cleanup, because other threads may be
    # building. The watchdog ends their compilers and removes their files. Nobody may write there
    # meanwhile.
    output.say_always("interrupted")
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(output.INTERRUPTED)


def _show_warning(message: Warning | str, *_where: object) -> None:
    """Show a warning without the line of code that it comes from."""
    output.say(f"warning: {message}")
