#!/usr/bin/env bash
# The one launcher: makes .venv in this checkout when it is missing or out of date, then runs a
# command in it. It never changes directory, so relative paths are the caller's. Everything that
# set-up prints goes to stderr: stdout belongs to the command.
set -euo pipefail

ROOT=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
VENV=$ROOT/.venv
MARK=$VENV/made-by-launch.sh # without it, a .venv is somebody else's and is left alone
STAMP=$VENV/installed        # fingerprint of what was installed; removed first, written last

usage() {
    cat <<'END'
usage: ./launch.sh COMMAND [ARGUMENT ...]

  demo        train the small looped model that ships with Reprise, and compare before with after
  test        run the tests; --thorough adds the longer ones; other arguments go to pytest
  train       train, in one process
  generate    sample from a model
  evaluate    accuracy of a model on a task
  bench       measure the rollout engine
  bench-step  measure the shape rule, replay and the learner's step
  verify      replay schedule logs and compare the bits
  probe       what a model predicts at each of its loops
  draw        picture of a schedule log
  gpu-check   check this machine's accelerator; the report goes to --out
  pretrain    make the small model that the demo starts from
  help        this text

COMMAND --help tells the arguments of one command. The first run makes .venv in this checkout
(Linux, Python 3.11 or 3.12) with the versions of constraints.txt; later runs use no network.
PYTHON=/path/to/python ./launch.sh ... uses that interpreter as it is and installs nothing.
OMP_NUM_THREADS is 1 unless set.
END
}

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $*"
    exit 1
}

# What decides whether an environment is up to date. $1: its interpreter.
fingerprint() {
    local version
    version=$("$1" -I -c 'import platform, sys; print(sys.implementation.cache_tag, platform.machine())' 2>/dev/null) || return 1
    { cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt" && printf '%s\n' "$version"; } | sha256sum | cut -d ' ' -f 1
}

ready() {
    local now
    [[ -f $STAMP ]] && now=$(fingerprint "$VENV/bin/python") && [[ $(<"$STAMP") == "$now" ]]
}

# Sets BASE to a Python that can make the environment.
find_python() {
    local name version found='' bare='' bare_version=''
    for name in python3 python3.12 python3.11 python; do
        # Run it, not just look for it: version managers leave shims of that name that fail.
        version=$("$name" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
        case $version in
            3.11 | 3.12)
                if "$name" -I -c 'import ensurepip, venv' 2>/dev/null; then
                    BASE=$name
                    return
                fi
                bare=${bare:-$name} bare_version=${bare_version:-$version}
                ;;
            *) found+="${found:+, }$name is $version" ;;
        esac
    done
    [[ -z $bare ]] || die "$bare ($bare_version) lacks the module venv or ensurepip, so $VENV cannot be made." \
        "On Debian or Ubuntu: apt-get install python$bare_version-venv"
    die "Python 3.11 or 3.12 is needed and was not found (${found:-no python3 or python on PATH})." \
        "Install one (on Debian or Ubuntu: apt-get install python3 python3-venv), or name an interpreter that" \
        "has the packages: PYTHON=/path/to/python $0 ..."
}

make_venv() {
    if [[ -e $VENV && ! -e $MARK && -n $(ls -A "$VENV") ]]; then
        die "$VENV exists and was not made by launch.sh. Remove it, or use it as it is: PYTHON=$VENV/bin/python $0 ..."
    fi
    local BASE
    find_python
    say "Making $VENV with $BASE (once; takes a few minutes and the network) ..."
    mkdir -p "$VENV"
    : >"$MARK"
    # Not venv --clear: it would remove the mark, and an interrupt just then would lock us out.
    find "$VENV" -mindepth 1 -maxdepth 1 ! -path "$MARK" -exec rm -rf {} +
    "$BASE" -I -m venv "$VENV" >&2 || die "making $VENV with $BASE failed; its message is above"
}

# -I everywhere: packages on the caller's PYTHONPATH must not pass for installed ones.
install() {
    local python=$VENV/bin/python now
    # A stamp means that the last installation was completed, so pip may work on top of it. Without
    # one, packages may be half written, and only a fresh start is sure.
    if [[ -f $STAMP ]] && "$python" -I -m pip --version >/dev/null 2>&1; then
        say "pyproject.toml, constraints.txt or Python changed: updating $VENV ..."
        rm -f "$STAMP"
    else
        make_venv
    fi
    now=$(fingerprint "$python") || die "$python does not run, although it was just made"
    "$python" -I - "$ROOT/pyproject.toml" >"$VENV/requirements.txt" <<'END' || die "reading the requirements in $ROOT/pyproject.toml failed"
import sys, tomllib
project = tomllib.load(open(sys.argv[1], "rb"))["project"]
print(*project["dependencies"], *project["optional-dependencies"]["dev"], sep="\n")
END
    rm -f "$VENV/pip.log"
    if ! "$python" -I -m pip --disable-pip-version-check --log "$VENV/pip.log" install \
        -c "$ROOT/constraints.txt" -r "$VENV/requirements.txt" >&2; then
        say ''
        [[ ! -f $VENV/pip.log ]] || sed -n 's/^[^ ]* *\(ERROR: .*\)/  \1/p' "$VENV/pip.log" | awk '!seen[$0]++' >&2
        die "pip could not install the packages of pyproject.toml at the versions of constraints.txt;" \
            "see its messages above or $VENV/pip.log. Nothing counts as installed: the next run starts afresh."
    fi
    "$python" -I -m pip --disable-pip-version-check check >&2 || die "the versions in constraints.txt do not fit together; pip's list is above"
    printf '%s\n' "$now" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    say "$VENV is ready."
}

set_up() {
    [[ -w $ROOT ]] || die "$ROOT is not writable, so .venv cannot be made there; use PYTHON=/path/to/python $0 ..."
    # The lock goes with descriptor 9. pip inherits it on purpose: if this shell is killed, a pip
    # that lives on still keeps others out.
    exec 9>"$ROOT/.launch.lock"
    if ! flock -n 9; then
        say "Waiting for another launch.sh that is installing into $VENV ..."
        flock 9
    fi
    ready || install
    exec 9>&-
}

run_tests() {
    local tests=$ROOT/tests folder=("$ROOT/tests") marker='not thorough' workers=() rest=() argument
    for argument in "$@"; do
        if [[ $argument == --thorough ]]; then
            marker=''
            continue
        fi
        rest+=("$argument")
        # Naming files or tests replaces the whole folder; a bare word (-k models) names none.
        case $(readlink -m -- "${argument%%::*}") in "$tests" | "$tests"/*) folder=() ;; esac
    done
    # An interpreter that was brought along may lack pytest-xdist: then one process.
    if "$python" -c 'import xdist' 2>/dev/null; then workers=(-n 2 --dist worksteal); fi
    exec "$python" -m pytest -c "$ROOT/pyproject.toml" --rootdir "$ROOT" -m "$marker" \
        ${workers[@]+"${workers[@]}"} ${folder[@]+"${folder[@]}"} ${rest[@]+"${rest[@]}"}
}

run_train() {
    local nodes=${NNODES:-1} processes=${NPROC_PER_NODE:-1}
    # Asked here and not in the trainer: under torchrun its refusal would come once a process, in the
    # middle of the agent's own traceback, and with NNODES=2 only after the nodes have met.
    if [[ $nodes != 1 || $processes != 1 ]]; then
        say "error: NNODES=$nodes NPROC_PER_NODE=$processes: training in several processes is not supported yet; leave both unset or 1"
        exit 2
    fi
    # One process does without torchrun, whose agent passes SIGTERM and SIGINT on but then dies of a
    # SignalException with status 1, however well the trainer saved, and kills a trainer that needs
    # more than 30 s for it. Here the trainer is this process: it gets the signals and its status is
    # ours. Nor does it get torchrun's variables: at a LOCAL_RANK accelerate opens a process group.
    exec "$python" -m train.run "$@"
}

command=${1-}
case $command in
    demo | evaluate | verify | pretrain) module=train.$command ;;
    generate | bench | draw) module=rollout.$command ;;
    probe) module=models.probe ;;
    gpu-check) module=train.gpu_check ;;
    bench-step) module=train.bench ;;
    test | train) module='' ;;
    help | -h | --help)
        usage
        exit 0
        ;;
    *)
        if [[ -n $command ]]; then say "error: unknown command '$command'"; fi
        usage >&2
        exit 2
        ;;
esac
shift

if [[ $ROOT == *:* ]]; then die "the path of this checkout, $ROOT, holds a colon, which PYTHONPATH cannot carry; move it"; fi
if [[ -n ${PYTHON-} ]]; then
    python=$(type -P -- "$PYTHON") || die "PYTHON=$PYTHON is not an interpreter that can be run"
else
    ready || set_up
    python=$VENV/bin/python
fi

# SAFEPATH: the caller's folder may hold its own train/ or models/, and must not be searched first.
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONSAFEPATH=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
case $command in
    test) run_tests "$@" ;;
    train) run_train "$@" ;;
    *) exec "$python" -m "$module" "$@" ;;
esac
