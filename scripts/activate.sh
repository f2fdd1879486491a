# Sourced by the other scripts: change to the repository and activate its environment, unless one is active.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -x .venv/bin/gpufn ] || scripts/install
    . .venv/bin/activate
fi
