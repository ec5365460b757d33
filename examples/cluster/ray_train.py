"""Train with Ray Train: ``python ray_train.py``, on the head of a Ray cluster or alone.

Ray Train makes a process group before it calls the function, and opkiln uses its store. So a
worker has nothing to say but ``opkiln.ensure``.
"""

import ray.train
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model


def train(config: dict[str, float]) -> None:
    import torch

    import opkiln

    (choice,) = opkiln.ensure("cpu_adam")  # one build in the job, one library on all workers
    model = prepare_model(torch.nn.Linear(64, 1), move_to_device=False)
    optimizer = opkiln.optim.CPUAdam(model.parameters(), lr=config["lr"])
    data, target = torch.randn(512, 64), torch.randn(512, 1)
    for _ in range(20):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(data), target)
        loss.backward()
        optimizer.step()
    ray.train.report({"loss": loss.item(), "library": choice.digest, "how": choice.how})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"lr": 1e-3},
        scaling_config=ScalingConfig(num_workers=2),
    )
    print(trainer.fit().metrics)
