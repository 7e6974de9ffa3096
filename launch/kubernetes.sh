#!/usr/bin/env bash
# Trains on Kubernetes, as a PyTorchJob of Kubeflow's training operator: one pod a node.
#
#   ./launch/kubernetes.sh --config llama3-8b-256k --image registry/megatron:1 --dry-run
#   ./launch/kubernetes.sh --config llama3-8b-256k --image registry/megatron:1 --claim data \
#       --data /data/books --output /data/runs/1
#
#   --image NAME        image with this project in its working directory, installed (required)
#   --name NAME         of the job (default: the configuration's)
#   --nodes N           number of pods (default: what the configuration is for)
#   --claim NAME        persistent volume claim, mounted at /data
#   --rdma RESOURCE     resource of the RDMA device plug-in, one a pod, as in rdma/hca
#
# --dry-run prints the manifest, as kubectl apply -f - reads it; launch/kubernetes.yaml is one.
set -euo pipefail
# shellcheck source=launch/launcher.sh
source "$(dirname "${BASH_SOURCE[0]}")/launcher.sh"

ENV_FILE=$ROOT/configs/nccl-cp.env
IMAGE='' NAME='' NODES='' CLAIM='' RDMA=''
take_option() {
    case "$1" in
        --image) IMAGE=$2 ;;
        --name) NAME=$2 ;;
        --nodes) NODES=$(whole_number "$@") || exit ;;
        --claim) CLAIM=$2 ;;
        --rdma) RDMA=$2 ;;
        *) return 1 ;;
    esac
}

# quoted WORD...: as elements of a YAML list in one line.
quoted() {
    local word separator=''
    for word in "$@"; do
        word=${word//\\/\\\\}
        printf '%s"%s"' "$separator" "${word//\"/\\\"}"
        separator=', '
    done
}

# The operator's variables, to be filled in by Kubernetes and not by this shell.
# shellcheck disable=SC2016
NODE_ARGUMENTS=(--nodes '$(PET_NNODES)' --node-rank '$(PET_NODE_RANK)'
    --master '$(MASTER_ADDR):$(MASTER_PORT)')

# pod REPLICAS: the part of the manifest that the master and the workers share.
pod() {
    local assignment
    cat <<POD
      replicas: $1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch # the operator looks for this name
              image: $(quoted "$IMAGE")
              command: ["./launch/torchrun_multi.sh"]
              args: [$(quoted "${NODE_ARGUMENTS[@]}" "${POD_ARGUMENTS[@]}")]
              env:
POD
    for assignment in "${ENV_SET[@]}"; do
        printf '                - {name: %s, value: %s}\n' \
            "${assignment%%=*}" "$(quoted "${assignment#*=}")"
    done
    cat <<POD
              securityContext:
                capabilities: {add: ["IPC_LOCK"]} # RDMA pins memory
              resources:
                limits: {nvidia.com/gpu: $RANKS${RDMA:+, $RDMA: 1}}
              volumeMounts:
                - {name: shared-memory, mountPath: /dev/shm}
POD
    [ -z "$CLAIM" ] || echo "                - {name: data, mountPath: /data}"
    cat <<POD
          volumes:
            - {name: shared-memory, emptyDir: {medium: Memory}} # for NCCL and data loaders
POD
    [ -z "$CLAIM" ] || echo \
        "            - {name: data, persistentVolumeClaim: {claimName: $(quoted "$CLAIM")}}"
}

manifest() {
    cat <<JOB
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: $(quoted "$NAME")
spec:
  pytorchReplicaSpecs:
    Master:
$(pod 1)
JOB
    [ "$NODES" -eq 1 ] || cat <<JOB
    Worker:
$(pod $((NODES - 1)))
JOB
}

parse_options "$@"
[ -n "$IMAGE" ] || die "no image is given" "--image NAME, with this project in it"
NAME=${NAME:-$(basename "$CONFIG" .args)}
[[ $NAME =~ ^[a-z0-9]([-a-z0-9]*[a-z0-9])?$ ]] || die "--name $NAME: not a name for Kubernetes" \
    "use lower-case letters, digits and -"
NODES=${NODES:-$CONFIG_NODES}

# Files are named as they are in the pod, so nothing is looked up here.
POD_ARGUMENTS=(--config "$CONFIG" --nproc-per-node "$RANKS")
for option in script:"$TRAIN_SCRIPT" data:"$DATA" data-cache:"$DATA_CACHE" \
    tokenizer:"$TOKENIZER" output:"$OUTPUT"; do
    [ -z "${option#*:}" ] || POD_ARGUMENTS+=("--${option%%:*}" "${option#*:}")
done
[ -z "$OUTPUT" ] || POD_ARGUMENTS+=(--save-interval "$SAVE_INTERVAL")
[ ${#EXTRA[@]} -eq 0 ] || POD_ARGUMENTS+=(-- "${EXTRA[@]}")

ENV_SET=()
read_env "$ENV_FILE"
if [ -n "$DRY_RUN" ]; then
    manifest
    exit
fi
has kubectl || die "kubectl was not found" "install it, or take what --dry-run prints elsewhere"
manifest | kubectl apply -f -
