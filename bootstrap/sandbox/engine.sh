# Sourced. Sets `engine`, the words that start every call of the container engine, and `limits`, the
# options that every build and run needs. bash 3.2 is enough.
# shellcheck shell=bash

choose_engine() {
  local name=${LORA_PODS_CONTAINER_ENGINE:-}
  if [ -z "$name" ]; then
    if command -v podman >/dev/null; then
      name=podman
    elif command -v docker >/dev/null; then
      name=docker
    else
      echo "the sandbox needs podman or docker: install one of them (Debian, Ubuntu: apt-get install podman)" >&2
      return 1
    fi
  fi
  engine=("$name")
  # crun, podman's default runtime, refuses cgroups that are not purely version 2.
  if [ "${name##*/}" = podman ] && [ "$(uname -s)" = Linux ] && [ "$(stat -fc %T /sys/fs/cgroup)" != cgroup2fs ]; then
    command -v runc >/dev/null || {
      echo "podman needs runc here, since this machine's cgroups are not version 2: apt-get install runc" >&2
      return 1
    }
    engine+=(--runtime runc)
  fi
  # Where the caller's own limits are lower than the engine's defaults, starting a container without these fails.
  # shellcheck disable=SC2034
  limits=(--ulimit nofile=1024:1024 --ulimit nproc=8192:8192)
}
