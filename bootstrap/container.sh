# shellcheck shell=bash
# What the sandbox pod runs in: podman, or a docker whose daemon answers. Which of them, and with
# what options, is decided where it is used (sandbox/engine.sh).

find_container() {
  if have "${LORA_PODS_CONTAINER_ENGINE:-podman}"; then
    note "containers: ${LORA_PODS_CONTAINER_ENGINE:-podman}"
  elif have docker && docker info >/dev/null 2>&1; then
    note "containers: docker"
  else
    return 1
  fi
}

# For the verbs that can do without: people whose pods are all hosts need no containers.
look_for_container() {
  find_container || say "containers: neither podman nor a running docker was found; sandbox pods, \`./dev demo\` and the tests need one"
}

ensure_container() {
  if find_container; then
    :
  elif [ "$(uname -s)" = Darwin ]; then
    die "neither podman nor a running docker was found. Run: brew install podman && podman machine init && podman machine start"
  else
    need podman:podman
  fi
  [ "$(uname -s)" = Linux ] && have podman || return 0
  # podman's default runtime, crun, refuses cgroups that are not purely version 2.
  [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ] || need runc:runc
  [ "$(id -u)" -eq 0 ] || need newuidmap:uidmap slirp4netns:slirp4netns
  # The image of the pod is made with it where no container registry answers.
  ! may_install || need debootstrap:debootstrap
}
