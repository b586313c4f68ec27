#!/bin/bash
# Train on several machines of a SLURM cluster, through time limits and preemptions:
#   sbatch --nodes 2 examples/slurm.sh headmix train-gen fit -c imagenet256
# The job saves and requeues itself before its time is over, and goes on from last.ckpt whenever it is started.
#SBATCH --job-name headmix
#SBATCH --ntasks-per-node 1
#SBATCH --gpus-per-node 8
#SBATCH --cpus-per-task 64
#SBATCH --time 24:00:00
#SBATCH --requeue
#SBATCH --open-mode append
#SBATCH --output %x-%j.log
#SBATCH --signal B:USR1@120

# else processes that torchrun starts again may find the addresses of those before them (pytorch/pytorch#135712)
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
gpus=${SLURM_GPUS_ON_NODE:?submit this script by sbatch}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))

save_and_requeue() {
    trap '' USR1
    # to torchrun and the processes it started; srun itself would kill them at SIGTERM
    scancel --signal TERM "$SLURM_JOB_ID.0"
    wait "$step"
    scontrol requeue "$SLURM_JOB_ID"
    exit
}
trap save_and_requeue USR1

srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "$gpus" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:$port" --no-python -- \
    "$@" --trainer.num_nodes "$SLURM_NNODES" --trainer.devices "$gpus" --ckpt-path auto &
step=$!
wait "$step"
