#!/usr/bin/env bash
# Writes constraints.txt: what pip resolves for the extra `dev` in a fresh environment, as plain `name==version` lines.
# torch stays at the version of TORCH (a line such as torch==2.13.0): raise it by hand. Further arguments go to pip.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/python" -m pip install --quiet "$@" "${TORCH:?a line such as torch==2.13.0}" -e '.[dev]'
{
  echo "# Every package of the extra dev, as tested together. Written by make lock; torch is raised by hand."
  "$folder/bin/python" -m pip list --format=freeze --exclude-editable --exclude pip --exclude setuptools |
    sed -e 's/+[a-z0-9.]*$//' | LC_ALL=C sort -f
} >constraints.txt
echo "constraints.txt: $(grep -c == constraints.txt) packages"
