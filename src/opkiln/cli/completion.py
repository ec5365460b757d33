"""``opkiln completion SHELL``: the script that teaches a shell to complete opkiln's commands."""

from __future__ import annotations

import click

from opkiln.cli import output


@click.command("completion", short_help="Print a completion script for a shell.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a completion script for SHELL.

    \b
    bash: opkiln completion bash > ~/.local/share/bash-completion/completions/opkiln
    zsh:  opkiln completion zsh > ~/.zfunc/_opkiln      (with ~/.zfunc in $fpath)
    fish: opkiln completion fish > ~/.config/fish/completions/opkiln.fish
    """
    from click.shell_completion import ShellComplete, get_completion_class

    from opkiln.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None
    # Of the base class: bash's own would first start a bash to ask for its version.
    output.data(ShellComplete.source(kind(cli, {}, "opkiln", "_OPKILN_COMPLETE")))
