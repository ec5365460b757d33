#!/bin/bash
# Start train.py with torchrun. Run it on every node, with the same arguments:
#
#   ./torchrun.sh HEAD:PORT NODES RANKS_PER_NODE
#   ./torchrun.sh node0:29500 2 8
#
# HEAD is one of the nodes. No shared disk is needed: each node has its own store, the op is built
# on one of them and travels to the others through the store that torchrun opens on HEAD.
set -euo pipefail

if [[ $# -ne 3 ]]; then
    echo "usage: $0 HEAD:PORT NODES RANKS_PER_NODE" >&2
    exit 2
fi
head=$1 nodes=$2 ranks=$3
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

# The name of the job. Two jobs on one HEAD:PORT at a time need two names.
job=${JOB_NAME:-train}

# If others can reach HEAD:PORT, set OPKILN_JOB_SECRET to the same value on every node
# (openssl rand -hex 32): then what ranks tell each other about libraries is authenticated.

# After a restart of its ranks, torchrun keeps the store; opkiln does not read what is old in it.
exec torchrun --nnodes="$nodes" --nproc-per-node="$ranks" --max-restarts=1 \
    --rdzv-backend=c10d --rdzv-endpoint="$head" --rdzv-id="$job" \
    ${LOCAL_ADDR:+--local-addr="$LOCAL_ADDR"} "$here/train.py"
