#!/bin/bash
# Build the image of deploy/Dockerfile on Debian without Docker, and train in it: make image-steps.
# As root, with buildah and mmdebstrap. TORCH_INDEX is another index for torch.
set -euo pipefail
export BUILDAH_ISOLATION=chroot
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
mmdebstrap -q --variant=minbase trixie "$folder/debian.tar"
printf '[global]\ncert = /etc/ssl/registry.crt\n' >"$folder/pip.conf"
base=$(buildah from scratch)
buildah add -q "$base" "$folder/debian.tar" /
# The package registry may have a certificate that only this machine knows.
buildah add -q "$base" "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" /etc/ssl/registry.crt
buildah add -q "$base" "$folder/pip.conf" /etc/pip.conf
buildah commit -q --rm "$base" docker.io/library/debian:trixie-slim
buildah bud --pull-never -f deploy/Dockerfile -t agentrl \
    ${TORCH_INDEX:+--build-arg "TORCH_INDEX=$TORCH_INDEX"} .

image=$(buildah from --pull-never localhost/agentrl)
buildah run "$image" -- agentrl train --config examples/hello/train.toml --name alone --steps 2
buildah run "$image" -- bash -c 'ls ~/.cache/agentrl/kernels/*.so' # the sampler compiled them
entrypoint=$(python3 -c "import yaml; print([one['spec']['entrypoint'] for one in
    yaml.safe_load_all(open('deploy/kubernetes/train.yaml')) if one['kind'] == 'RayJob'][0])")
buildah run --env AGENTRL_RUN__STEPS=2 "$image" -- bash -c "
    trap 'ray stop' EXIT
    ray start --head --num-cpus 4 && ray job submit --address http://127.0.0.1:8265 -- $entrypoint"
buildah rm "$image"
