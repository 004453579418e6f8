"""How every command reports failure: one line and exit status 2, never a traceback.

A ValueError is the caller's to mend, a RuntimeError a broken contract between files or
processes, an OSError or MemoryError the machine's refusal; anything else is a bug of this
project and keeps its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def run_cli(main: Callable[[], int]) -> None:
    """Run `main` and exit with its status; print the errors named above as one line.

    A stream that the caller closed (`>&-`), for which Python has None, swallows what is written.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        status = 141  # the reader went away (for instance `| head`): as a shell reports it
        # The interpreter flushes once more at exit; let it write into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except MemoryError as error:
        print(f"error: out of memory {' '.join(str(error).split())}".rstrip(), file=sys.stderr)
        status = 2
    except (ValueError, RuntimeError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
