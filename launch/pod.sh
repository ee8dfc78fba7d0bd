#!/usr/bin/env bash
# Runs one launcher on every host of a TPU slice.
#
#   launch/pod.sh --tpu=NAME --zone=ZONE [--project=PROJECT] [--dir=DIR]
#                 [--python=PYTHON] [--dry-run] -- launch/serve.py FLAGS
#
# DIR is the checkout on each host (default: glm-jax in the home folder),
# PYTHON its interpreter (default: .venv/bin/python in DIR). `make` on a host
# sets both up:
#
#   gcloud compute tpus tpu-vm ssh NAME --zone=ZONE --worker=all \
#     --command='git clone URL glm-jax && cd glm-jax && \
#       python3 -m venv .venv && .venv/bin/pip install -q -e ".[tpu,serve]"'
#
# Every host runs the same command and finds the others by itself
# (--coordinator_address=auto). Lines on stderr begin with the number of the
# process, [0] first; results come from process 0 alone.
#
# When a process dies or falls silent for --heartbeat_seconds (30), process 0
# says which one and ends; so do all others, and this script exits with their
# status, not 0. Nothing is restarted: run the command again (training resumes
# from its last checkpoint). Ctrl-C ends the launcher on every host.
set -euo pipefail

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p;}' "$0"
}

fail() {
  echo "pod.sh: $1" >&2
  exit 2
}

tpu='' zone='' project='' dir=glm-jax python='' dry_run=false
while (($#)); do
  case "$1" in
    --tpu=*) tpu=${1#*=} ;;
    --zone=*) zone=${1#*=} ;;
    --project=*) project=${1#*=} ;;
    --dir=*) dir=${1#*=} ;;
    --python=*) python=${1#*=} ;;
    --dry-run | --dry_run) dry_run=true ;;
    -h | --help)
      usage
      exit 0
      ;;
    --)
      shift
      break
      ;;
    *) fail "unknown argument '$1'; what runs stands after --, see --help" ;;
  esac
  shift
done

[[ -n $tpu ]] || fail '--tpu=NAME is needed'
[[ -n $zone ]] || fail '--zone=ZONE is needed'
(($#)) || fail 'give a launcher and its flags after --'
[[ $1 == *.py ]] || fail "'$1' is no launcher: give the path of a .py file"

python=${python:-.venv/bin/python}
# Each argument is quoted for the shell on the other side.
printf -v run ' %q' "$python" "$@" --coordinator_address=auto
pid_file=".glm-jax.$tpu.pid"
printf -v remote 'cd %q && echo $$ > %q && exec%s' "$dir" "$pid_file" "$run"
printf -v stop 'cd %q && kill "$(cat %q)"' "$dir" "$pid_file"

ssh=(gcloud compute tpus tpu-vm ssh "$tpu" "--zone=$zone" --worker=all)
[[ -z $project ]] || ssh+=("--project=$project")

if $dry_run; then
  printf '%q ' "${ssh[@]}" "--command=$remote"
  echo
  exit 0
fi
command -v gcloud > /dev/null || fail 'gcloud is not installed here'

end_all() {
  trap - INT TERM
  "${ssh[@]}" "--command=$stop" || true
  exit 130
}
trap end_all INT TERM

"${ssh[@]}" "--command=$remote" &
wait $!
