"""Print the table of ResNet-152 for one image, and its split into 4 stages."""

import torch
from torchvision.models import resnet152

import modelsummary

model = resnet152().eval()
stats = modelsummary.Statistics(model, input_data=(1, 3, 224, 224))
print(stats)

stages = stats.split(4)
print(f"\n{stages}\n")

images = torch.randn(2, 3, 224, 224)
with torch.no_grad():
    print("Stages equal the model, bit for bit:", torch.equal(stages(images), model(images)))
