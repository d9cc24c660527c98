#!/usr/bin/env bash
# A Docker engine with compose for `make compose-test` on a machine without one, Debian and root alone:
# engine.sh start DIR | stop DIR. Everything is kept in DIR, and the client is told by DIR/environment. No image can be
# pulled on a machine without a registry, so the base image python:3.11-slim is made here of Debian's packages.
set -Eeuo pipefail
command=${1:?start or stop}; dir=$(realpath -m "${2:?a folder for the engine}"); compose=2.40.3
export DOCKER_HOST="unix://$dir/docker.sock" DOCKER_CONFIG="$dir/client"

start() {
  packages=(docker.io containerd runc iptables debootstrap)
  dpkg -s "${packages[@]}" >/dev/null 2>&1 || { apt-get update -qq; apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null; }
  plugin=$DOCKER_CONFIG/cli-plugins/docker-compose
  if [ ! -x "$plugin" ]; then  # Debian 12 has no compose 2: 5 minutes on two cores. `go install` refuses its go.mod.
    source=$(cd / && GOFLAGS=-mod=mod go mod download -json "github.com/docker/compose/v2@v$compose" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
    mkdir -p "${plugin%/*}"
    (cd "$source" && go build -trimpath -ldflags "-s -w -X github.com/docker/compose/v2/internal.Version=v$compose" -o "$plugin" ./cmd)
  fi
  nohup dockerd --data-root "$dir/data" --exec-root "$dir/exec" -H "$DOCKER_HOST" --pidfile "$dir/pid" >"$dir/log" 2>&1 &
  trap 'kill "$(cat "$dir/pid")"' ERR
  for _ in $(seq 60); do docker info >/dev/null 2>&1 && break; sleep 0.5; done
  docker info >/dev/null 2>&1 || { tail -5 "$dir/log" >&2; exit 1; }
  # The engine's own builder: BuildKit wants another plugin.
  printf '%s\n' "DOCKER_HOST=$DOCKER_HOST" "DOCKER_CONFIG=$DOCKER_CONFIG" DOCKER_BUILDKIT=0 >"$dir/environment"
  docker image inspect python:3.11-slim >/dev/null 2>&1 || base
}

base() {
  root=$dir/root
  rm -rf "$root"
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$root" >"$dir/debootstrap.log" 2>&1
  ln -sf python3 "$root/usr/bin/python"
  rm -rf "$root"/usr/lib/python3*/EXTERNALLY-MANAGED "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
  # What this machine trusts, a package mirror's certificate among it.
  cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
  tar -C "$root" -c . | docker import --change 'CMD ["python3"]' --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' - python:3.11-slim >/dev/null
  rm -rf "$root"
}

stop() {
  kill "$(cat "$dir/pid")"
  for _ in $(seq 60); do [ -e "$dir/pid" ] || exit 0; sleep 0.5; done
}

case $command in start|stop) $command ;; *) echo "start or stop" >&2; exit 2 ;; esac
