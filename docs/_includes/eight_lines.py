import torch

import torchlift

torch.save(torch.nn.Linear(4096, 4096).state_dict(), "model.pt")  # in place of yours

model = torchlift.skeleton(torch.nn.Linear, 4096, 4096)  # no memory for weights
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # may exist before the load
report = torchlift.load(model, "model.pt")  # or: source="read", dtype=, device=
print(report)
print("output:", tuple(model(torch.ones(2, 4096)).shape))
