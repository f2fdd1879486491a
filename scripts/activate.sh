# Sourced by the other scripts: stands in the repository, in the active virtual environment or in one of its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -x .venv/bin/gpufn ] || scripts/install
    . .venv/bin/activate
fi
