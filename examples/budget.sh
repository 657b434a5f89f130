#!/usr/bin/env bash
# A budget for each model: the exit status is 1 if one is exceeded, for a job in CI.
#
#     pip install 'torch-modelsummary[torchvision]' && examples/budget.sh
set -u
status=0
check() { modelsummary "$@" --depth 0 --columns num_params,macs || status=1; }
check torchvision:mobilenet_v2 --input 1,3,224,224 --max-params 4M --max-macs 310M
check torchvision:resnet18 --input 32,3,224,224 --max-params 12M --max-macs 60G --memory adamw --max-memory 2GiB
exit "$status"
