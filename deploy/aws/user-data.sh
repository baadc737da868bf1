#!/bin/bash
# User data for a launch template. It starts one worker for each GPU of the instance.
# The image must contain NVIDIA's driver, and ComfyUI with its nodes and models in /opt/ComfyUI.
# Models are large. With an image or a shared volume, the instance starts much faster than with a
# download.
set -euo pipefail

CONTROL=https://fleet.example.com       # COMFYFLEET_PUBLIC_URL of the control plane
FLEET=gpus
STAGE=production
SECRET_PARAMETER=/comfyfleet/$FLEET/$STAGE/secret   # a SecureString in the Parameter Store
VERSION=" @ https://example.com/comfyfleet-0.1.0-py3-none-any.whl"  # after the release: ==0.1.0

metadata=http://169.254.169.254/latest
key=$(curl --fail --silent --show-error --retry 5 -X PUT "$metadata/api/token" \
    -H "X-aws-ec2-metadata-token-ttl-seconds: 300")
from_metadata() {
    curl --fail --silent --show-error --retry 5 -H "X-aws-ec2-metadata-token: $key" \
        "$metadata/meta-data/$1"
}
instance=$(from_metadata instance-id)
region=$(from_metadata placement/region)

id comfyfleet >/dev/null 2>&1 || useradd --system --home-dir /var/lib/comfyfleet comfyfleet
python3 -m venv /opt/comfyfleet
/opt/comfyfleet/bin/pip install --quiet "comfyfleet[worker,aws]$VERSION"

# Don't put the secret into the user data, which is readable with permission to describe the instance.
secret=$(/opt/comfyfleet/bin/python - "$region" "$SECRET_PARAMETER" <<'PYTHON'
import sys

import boto3

ssm = boto3.client("ssm", region_name=sys.argv[1])
print(ssm.get_parameter(Name=sys.argv[2], WithDecryption=True)["Parameter"]["Value"])
PYTHON
)
install -d -m 0750 -g comfyfleet /etc/comfyfleet
(
    umask 077
    cat > /etc/comfyfleet/worker.env <<SETTINGS
COMFYFLEET_CONTROL=$CONTROL
COMFYFLEET_FLEET=$FLEET
COMFYFLEET_STAGE=$STAGE
COMFYFLEET_MACHINE=$instance
COMFYFLEET_FLEET_SECRET=$secret
AWS_REGION=$region
SETTINGS
)

# The image contains the systemd unit comfyfleet-worker@.service.
systemctl daemon-reload
gpus=$(nvidia-smi --query-gpu=index --format=csv,noheader)
for gpu in $gpus; do
    systemctl enable --now "comfyfleet-worker@$gpu"
done
