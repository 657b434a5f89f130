#!/usr/bin/env bash
# Check a budget per model in CI: the exit status is 1 if a budget is exceeded.
#
#     pip install '.[torchvision]' && examples/budget.sh
set -u
status=0
check() { modelsummary "$@" --depth 0 --columns num_params,macs || status=1; }
check torchvision:mobilenet_v2 --input 1,3,224,224 --max-params 4M --max-macs 310M
check torchvision:resnet18 --input 32,3,224,224 --max-params 12M --max-macs 60G --memory adamw --max-memory 2GiB
exit "$status"
