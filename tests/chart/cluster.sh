#!/usr/bin/env bash
# A one-node Kubernetes with cluster DNS and a service proxy, for trying the chart on a machine with Debian, root and Go
# but without a registry: cluster.sh build DIR | start DIR | stop DIR. Everything is kept in DIR; build takes a quarter
# of an hour on two cores, once. Images come in by `ctr -a DIR/containerd.sock -n k8s.io images import FILE.tar`.
set -euo pipefail
command=${1:?build, start or stop}; dir=$(realpath -m "${2:?a folder}"); kubernetes=1.33.4; helm=3.18.6; coredns=1.12.4
mkdir -p "$dir/bin" "$dir/log"; export PATH="$dir/bin:$PATH" KUBECONFIG="$dir/kubeconfig"

build() {
  mkdir -p "$dir/build"; cd "$dir/build"; export GOFLAGS=-mod=mod
  [ -x "$dir/bin/helm" ] || GOBIN="$dir/bin" go install "helm.sh/helm/v3/cmd/helm@v$helm"
  rm -f go.mod go.sum; go mod init local/kubernetes >/dev/null 2>&1
  source=$(go mod download -json "k8s.io/kubernetes@v$kubernetes" | sed -n 's/.*"Dir": "\(.*\)".*/\1/p')
  # Its own go.mod names the staging modules as v0.0.0 and replaces them; only a main module may do that.
  for module in $(grep -oE 'k8s.io/[a-z-]+ v0\.0\.0$' "$source/go.mod" | awk '{print $1}' | sort -u); do
    go mod edit -replace "$module=$module@v0${kubernetes#1}"
  done
  go mod edit -require "k8s.io/kubernetes@v$kubernetes"
  programs=(kube-apiserver kubectl kubelet kube-controller-manager kube-scheduler kube-proxy)
  { echo '//go:build tools'; echo 'package tools'; for p in "${programs[@]}"; do echo "import _ \"k8s.io/kubernetes/cmd/$p\""; done; } >tools.go
  go mod tidy >tidy.log 2>&1
  # Else they say that they are v0.0.0, which the chart refuses.
  version=k8s.io/component-base/version; flags="-X $version.gitVersion=v$kubernetes -X $version.gitMajor=1 -X $version.gitMinor=33"
  for p in "${programs[@]}"; do [ -x "$dir/bin/$p" ] || go build -ldflags "$flags" -o "$dir/bin/" "k8s.io/kubernetes/cmd/$p"; done
  [ -x "$dir/bin/coredns" ] || GOBIN="$dir/bin" go install "github.com/coredns/coredns@v$coredns"
}

run() { name=$1; shift; nohup "$@" >"$dir/log/$name.log" 2>&1 & echo $! >"$dir/$name.pid"; }

start() {
  packages=(etcd-server etcd-client containerd runc containernetworking-plugins iptables conntrack openssl gcc libc6-dev)
  dpkg -s "${packages[@]}" >/dev/null 2>&1 || { apt-get update -qq; apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null; }
  cd "$dir"; mkdir -p cni pause
  node=$(hostname -I | cut -d' ' -f1)
  [ -f sa.key ] || { openssl genrsa -out sa.key 2048 2>/dev/null; openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null; openssl rand -hex 16 >token; }
  token=$(cat token); echo "$token,admin,admin,\"system:masters\"" >tokens.csv
  cat >kubeconfig <<CONFIG
apiVersion: v1
kind: Config
clusters: [{name: local, cluster: {server: "https://127.0.0.1:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: $token}}]
contexts: [{name: local, context: {cluster: local, user: admin}}]
current-context: local
CONFIG
  cat >cni/10-bridge.conflist <<'CONFIG'
{"cniVersion": "0.4.0", "name": "local", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.244.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
CONFIG
  cat >containerd.toml <<CONFIG
version = 2
root = "$dir/containerd"
state = "$dir/containerd-state"
[grpc]
  address = "$dir/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$dir/cni"
CONFIG
  cat >kubelet.yaml <<CONFIG
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
cgroupDriver: cgroupfs
failSwapOn: false
containerRuntimeEndpoint: unix://$dir/containerd.sock
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {nodefs.available: "1%", imagefs.available: "1%"}
clusterDNS: ["$node"]
clusterDomain: cluster.local
CONFIG
  # The time to live that kubeadm sets: what clients keep.
  cat >Corefile <<CONFIG
.:53 {
  bind $node
  kubernetes cluster.local { kubeconfig $dir/kubeconfig
    ttl 30 }
  cache 30
}
CONFIG
  run etcd etcd --data-dir "$dir/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
  run kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --authorization-mode=Node,RBAC --token-auth-file=tokens.csv \
    --service-account-key-file=sa.pub --service-account-signing-key-file=sa.key --service-account-issuer=https://kubernetes.default.svc \
    --cert-dir="$dir/certs" --secure-port=6443 --bind-address=127.0.0.1 --advertise-address="$node" --service-cluster-ip-range=10.96.0.0/16 --allow-privileged \
    --kubelet-preferred-address-types=InternalIP
  for _ in $(seq 120); do kubectl get --raw /readyz >/dev/null 2>&1 && break; sleep 1; done
  run containerd containerd -c "$dir/containerd.toml"
  run kube-controller-manager kube-controller-manager --kubeconfig "$KUBECONFIG" --service-account-private-key-file=sa.key --cluster-cidr=10.244.0.0/16
  run kube-scheduler kube-scheduler --kubeconfig "$KUBECONFIG"
  # Pods share one bridge: without a new source address an answer would come back past the proxy's translation.
  run kube-proxy kube-proxy --kubeconfig "$KUBECONFIG" --hostname-override node1 --proxy-mode=iptables --masquerade-all --cluster-cidr=10.244.0.0/16 --conntrack-max-per-core=0
  run coredns coredns -conf "$dir/Corefile"
  if [ ! -f pause.tar ]; then  # an image whose one program waits: an image archive made by hand, since nothing can be pulled
    printf '#include <unistd.h>\nint main(void) { for (;;) pause(); }\n' >pause/pause.c
    gcc -static -O2 -o pause/pause pause/pause.c
    python3 - <<'PROGRAM'
import hashlib, io, json, tarfile
def layer():
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.add("pause/pause", "pause")
    return data.getvalue()
blob = layer(); diff = "sha256:" + hashlib.sha256(blob).hexdigest()
config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Entrypoint": ["/pause"]},
                     "rootfs": {"type": "layers", "diff_ids": [diff]}}).encode()
with tarfile.open("pause.tar", "w") as out:
    def add(name, data):
        info = tarfile.TarInfo(name); info.size = len(data); out.addfile(info, io.BytesIO(data))
    add("layer.tar", blob); add("config.json", config)
    add("manifest.json", json.dumps([{"Config": "config.json", "RepoTags": ["localhost/pause:1"], "Layers": ["layer.tar"]}]).encode())
PROGRAM
  fi
  for _ in $(seq 30); do ctr -a "$dir/containerd.sock" version >/dev/null 2>&1 && break; sleep 0.5; done
  ctr -a "$dir/containerd.sock" -n k8s.io images import pause.tar >/dev/null
  run kubelet kubelet --config "$dir/kubelet.yaml" --kubeconfig "$KUBECONFIG" --root-dir "$dir/kubelet" --hostname-override node1 --node-ip "$node" --cert-dir "$dir/kubelet-certs"
  for _ in $(seq 60); do kubectl get nodes 2>/dev/null | grep -q ' Ready' && break; sleep 1; done
  kubectl get nodes; echo "KUBECONFIG=$KUBECONFIG"
}

stop() {
  for name in kubelet coredns kube-proxy kube-scheduler kube-controller-manager containerd kube-apiserver etcd; do
    [ -f "$dir/$name.pid" ] && kill "$(cat "$dir/$name.pid")" 2>/dev/null || true
    sleep 1
  done
  # Pods that still run outlive this: delete them first.
  "$dir/bin/kube-proxy" --cleanup >/dev/null 2>&1 || true
  ip link delete cni0 2>/dev/null || true
}

case $command in build|start|stop) $command ;; *) echo "build, start or stop" >&2; exit 2 ;; esac
