"""The ``opkiln`` command: finds the sub-command, and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
import warnings
from importlib import import_module

import click

from opkiln import __version__, settings
from opkiln.cli import output, verbosity
from opkiln.errors import OpkilnError, StoreError

# A command's module is imported when it runs, or when --help needs its first line.
_COMMANDS = (
    "run", "build", "plan", "explain", "arch", "check", "report", "doctor", "cache", "new", "demo",
    "completion",
)  # fmt: skip


class _Commands(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 (click's signature)
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"opkiln.cli.{cmd_name}").command
        return verbosity.equip(command)


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

    Ops are built at their first use. These commands build them earlier, and say what is built,
    what would be, and why. Data is written to standard output, progress to standard error.
    """
    if ctx.invoked_subcommand == "doctor":
        return  # it finds what is wrong with them, beside all else
    for setting in settings.table():
        setting.resolve()  # a value without a meaning is an error at once, not when it is used


verbosity.equip(cli)


def main() -> None:
    """The entry point: run the command line, exit with its code."""
    warnings.showwarning = _show_warning  # type: ignore[assignment]
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    try:
        code = cli.main(arguments, prog_name="opkiln", standalone_mode=False)
        if sys.stdout is not None:  # closed before we started, and nothing was to be written
            sys.stdout.flush()
    except OpkilnError as error:
        output.say_failure(error)
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        output.say_end(error.format_message())
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "opkiln"
        output.say_error(error.format_message(), f"{path} --help")
        return error.exit_code
    except click.ClickException as error:
        output.say_error(error.format_message())
        return error.exit_code
    except click.Abort as abort:
        if isinstance(abort.__context__, KeyboardInterrupt):
            _leave_interrupted()
        output.say_end("\nnothing was done")
        return output.FOUND
    except BrokenPipeError:
        output.discard()  # whoever read it has enough
        return output.FOUND
    except OSError as error:
        # A full disk or a closed file under our output, or what no command has a word for.
        output.discard()
        reason = error.strerror or str(error)
        output.say_error(f"{os.fsdecode(error.filename)}: {reason}" if error.filename else reason)
        return StoreError.exit_code
    return code if isinstance(code, int) else 0


def _leave_interrupted() -> None:
    # At once, and not through the interpreter's exit: other threads may be building. The watchdog
    # ends their compilers and removes what they staged, and must not find them writing there.
    output.say_end("interrupted")
    if sys.stdout is not None:
        sys.stdout.flush()
    os._exit(output.INTERRUPTED)


def _show_warning(message: Warning | str, *_where: object) -> None:
    """Warnings as a command gives them: without the line of code that they come from."""
    output.say(f"warning: {message}")
