"""Print the table of ResNet-152 for one image."""

from torchvision.models import resnet152

import modelsummary

stats = modelsummary.Statistics(resnet152(), input_data=(1, 3, 224, 224))
print(stats)
