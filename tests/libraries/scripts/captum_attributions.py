"""captum: attributions to inputs and layers, by gradients, by occlusion and by sampling."""

import json

import torch
from captum.attr import DeepLift, FeatureAblation, IntegratedGradients, LayerConductance, LayerGradCam, Occlusion

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 3))
images = torch.randn(2, 1, 8, 8)
# begin
device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
model, images = model.to(device).eval(), images.to(device)
baseline = torch.zeros_like(images)
attributions = {
    "integrated": IntegratedGradients(model).attribute(images, baseline, target=1, n_steps=10),
    "deeplift": DeepLift(model).attribute(images, baseline, target=1),
    "occlusion": Occlusion(model).attribute(images, target=1, sliding_window_shapes=(1, 4, 4), strides=(1, 4, 4)),
    "conductance": LayerConductance(model, model[0]).attribute(images, baseline, target=1, n_steps=5),
    "gradcam": LayerGradCam(model, model[0]).attribute(images, target=1),
}
# end
corners = (torch.arange(8) // 4).to(device)
masks = (corners[:, None] * 2 + corners)[None, None]
attributions["ablation"] = FeatureAblation(model).attribute(images, target=1, feature_mask=masks)
print(json.dumps({"device": str(attributions["ablation"].device),
                  **{name: attribution.flatten().tolist() for name, attribution in attributions.items()}}))
