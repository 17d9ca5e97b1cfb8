#!/usr/bin/env bash
# The first run on a machine with one GPU, no network and ten minutes: checks, figures, TRL. benchmarks/README.md has more.
#   OUT=folder bash .gpu/first_run.sh                       all parts, within TOTAL=560 seconds
#   OUT=folder ONLY="bench trl" bash .gpu/first_run.sh      some groups or parts again; their lines are added
#   SIIRL_TEST_DEVICE=cpu OUT=folder PY=.venv/bin/python bash .gpu/first_run.sh     a rehearsal with tiny models
set -eu
here=$(cd "$(dirname "$0")" && pwd)
PY=${PY:-python3}
SITE=${SITE:-build/gpu-site}
TOTAL=${TOTAL:-560}
: "${OUT:?OUT=folder is missing: where results.jsonl, summary.txt, all.log and logs.tgz go}"

if [ -d "$here/wheels" ] && ! ls "$here/wheels" | cmp -s - "$SITE/installed"; then
  if "$PY" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --upgrade \
    --target "$SITE" "$here"/wheels/*.whl; then
    ls "$here/wheels" >"$SITE/installed"
  else
    echo "the wheels did not install: parts that need them will fail, and the others run" >&2
  fi
fi
export PYTHONPATH=".:storage:$SITE"
exec "$PY" "$here/first_run.py" --out "$OUT" --only "${ONLY:-}" --seconds "$((TOTAL - SECONDS))"
