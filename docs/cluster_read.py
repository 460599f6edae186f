from cluster_train import build

import torchlift

model = torchlift.skeleton(build, width=32, layers=2)
print(torchlift.load(model, "run/model.safetensors"))
