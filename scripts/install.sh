#!/usr/bin/env bash
# Installs the package to a virtual environment on Debian or Ubuntu with an NVIDIA GPU. It needs no CUDA toolkit.
#
#     scripts/install.sh                    # to .venv of this checkout
#     scripts/install.sh --venv /opt/codegen --apt
#     scripts/install.sh --no-gpu           # only renders and compiles: no driver, no torch
#     scripts/install.sh --dry-run          # prints the commands without running them
#
# It checks the driver and Python, chooses CUDA 12 or 13 by the driver's version, and ends with `codegen doctor`.
set -euo pipefail

readonly oldest_cu12=525 # the first driver of CUDA 12; NVRTC's cubins load on every driver of the same major version
readonly oldest_cu13=580
readonly oldest_python=11 # of Python 3

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
cuda=""
gpu=yes
apt=no
dry=no

usage() {
    cat <<'USAGE'
Usage: scripts/install.sh [--venv DIR] [--cuda cu12|cu13] [--no-gpu] [--apt] [--dry-run]

  --venv DIR         folder of the virtual environment; by default, .venv of this checkout
  --cuda cu12|cu13   CUDA version; by default, chosen by the driver's version
  --no-gpu           without a GPU: only renders and compiles, without driver and torch
  --apt              installs missing Python packages with apt-get; requires root
  --dry-run          prints the commands without running them
USAGE
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

run() {
    printf '+ %s\n' "$*"
    if [ "$dry" = no ]; then
        "$@"
    fi
}

read_options() {
    while [ $# -gt 0 ]; do
        case "$1" in
            --venv | --cuda)
                [ $# -ge 2 ] || fail "$1 needs a value; see --help"
                if [ "$1" = --venv ]; then venv="$2"; else cuda="$2"; fi
                shift
                ;;
            --no-gpu) gpu=no ;;
            --apt) apt=yes ;;
            --dry-run) dry=yes ;;
            --help | -h)
                usage
                exit 0
                ;;
            *) fail "unknown option $1; see --help" ;;
        esac
        shift
    done
    case "$cuda" in
        "" | cu12 | cu13) ;;
        *) fail "--cuda is $cuda; allowed: cu12, cu13" ;;
    esac
}

check_system() {
    local release="${OS_RELEASE:-/etc/os-release}"
    [ -r "$release" ] || fail "$release does not exist: this script is for Debian and Ubuntu; see docs/guide/install.md"
    local like
    like="$(sed -n 's/^ID\(_LIKE\)\{0,1\}=//p' "$release" | tr -d '"' | tr '\n' ' ')"
    case " $like " in
        *" debian "* | *" ubuntu "*) ;;
        *) fail "this is ${like% }: this script is for Debian and Ubuntu; see docs/guide/install.md" ;;
    esac
    [ "$(uname -m)" = x86_64 ] || fail "this is $(uname -m): the script supports x86_64 only"
}

# Chooses the extra by the driver's version, unless --cuda is given.
check_driver() {
    if [ "$gpu" = no ]; then
        cuda="${cuda:-cu13}"
        echo "without a GPU: $cuda, without torch"
        return
    fi
    command -v nvidia-smi >/dev/null ||
        fail "nvidia-smi is not found: install NVIDIA's driver (Debian: apt-get install nvidia-driver; Ubuntu:" \
            "ubuntu-drivers install) and restart; or use --no-gpu, to only render and compile"
    local told version major
    told="$(nvidia-smi --query-gpu=driver_version,name --format=csv,noheader 2>&1)" ||
        fail "nvidia-smi fails ($(printf '%s' "$told" | head -n 1)): is the driver loaded? Restart after an update"
    version="$(printf '%s\n' "$told" | head -n 1 | cut -d , -f 1)"
    major="${version%%.*}"
    case "$major" in
        "" | *[!0-9]*) fail "nvidia-smi prints no driver version, but: $(printf '%s' "$told" | head -n 1)" ;;
    esac
    [ "$major" -ge "$oldest_cu12" ] ||
        fail "the driver is $version; $oldest_cu12 or later is needed (CUDA 12), $oldest_cu13 for CUDA 13: update it"
    if [ "$cuda" = cu13 ] && [ "$major" -lt "$oldest_cu13" ]; then
        fail "--cuda is cu13, but the driver is $version; $oldest_cu13 or later is needed: update it, or use --cuda cu12"
    fi
    if [ -z "$cuda" ]; then
        if [ "$major" -ge "$oldest_cu13" ]; then cuda=cu13; else cuda=cu12; fi
    fi
    printf '%s\n' "$told" | cut -d , -f 2 | sed 's/^ */GPU: /'
    echo "driver $version: $cuda"
}

# Prints the first Python that is recent enough.
find_python() {
    local name
    for name in python3.13 python3.12 python3.11 python3; do
        if command -v "$name" >/dev/null &&
            "$name" -c "import sys; sys.exit(sys.version_info < (3, $oldest_python))" 2>/dev/null; then
            echo "$name"
            return
        fi
    done
}

check_python() {
    python="$(find_python)"
    if [ -z "$python" ]; then
        local package="python3.$oldest_python"
        [ "$apt" = yes ] || fail "Python 3.$oldest_python or later is not found: apt-get install $package $package-venv, or --apt"
        run apt-get update
        run apt-get install --yes "$package" "$package-venv"
        python="$package"
    elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        local package
        package="$("$python" -c 'import sys; print(f"python3.{sys.version_info.minor}-venv")')"
        [ "$apt" = yes ] || fail "$python cannot create virtual environments: apt-get install $package, or use --apt"
        run apt-get update
        run apt-get install --yes "$package"
    fi
    echo "Python: $python"
}

install_package() {
    if [ -e "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ]; then
        fail "$venv exists and is not a virtual environment: choose another folder with --venv"
    fi
    local extras="$cuda"
    [ "$gpu" = no ] || extras="$cuda,torch"
    run "$python" -m venv "$venv"
    # For CUDA 13, the versions of the tests and the receipts: newer ones may be too new for the driver.
    local constraints=()
    [ "$cuda" = cu12 ] || constraints=(--constraint "$root/tests/constraints.txt")
    run "$venv/bin/pip" install "${constraints[@]}" --editable "${root}[${extras}]"
    if ! run "$venv/bin/codegen" doctor; then
        fail "the package is installed, but codegen doctor found a problem"
    fi
    echo "done: . $venv/bin/activate"
}

read_options "$@"
check_system
check_driver
check_python
install_package
