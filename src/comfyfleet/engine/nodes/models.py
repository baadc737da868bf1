"""Nodes that name models. There are none here, so they say what a ComfyUI without models says."""

from comfyfleet.engine.declare import Interface, choice, node, pure
from comfyfleet.engine.node import Context, Result
from comfyfleet.kernel.errors import NodeFailed

SAMPLERS = (
    *("euler", "euler_cfg_pp", "euler_ancestral", "euler_ancestral_cfg_pp", "heun", "heunpp2"),
    *("exp_heun_2_x0", "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral", "lms", "dpm_fast"),
    *("dpm_adaptive", "dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde"),
    *("dpmpp_sde_gpu", "dpmpp_2m", "dpmpp_2m_cfg_pp", "dpmpp_2m_sde", "dpmpp_2m_sde_gpu"),
    *("dpmpp_2m_sde_heun", "dpmpp_2m_sde_heun_gpu", "dpmpp_3m_sde", "dpmpp_3m_sde_gpu", "ddpm"),
    *("lcm", "ipndm", "ipndm_v", "deis", "res_multistep", "res_multistep_cfg_pp"),
    *("res_multistep_ancestral", "res_multistep_ancestral_cfg_pp", "gradient_estimation"),
    *("gradient_estimation_cfg_pp", "er_sde", "seeds_2", "seeds_3", "sa_solver"),
    *("sa_solver_pece", "ddim", "uni_pc", "uni_pc_bh2"),
)
CHECKPOINT_TOOLTIP = "The name of the checkpoint (model) to load."


@node(
    Interface(
        "CheckpointLoaderSimple",
        "Load Checkpoint",
        "nodes",
        "model/loaders",
        inputs={"ckpt_name": [[], {"tooltip": CHECKPOINT_TOOLTIP}]},
        outputs=("MODEL", "CLIP", "VAE"),
        classic=True,
    )
)
def load_checkpoint(context: Context, ckpt_name: str) -> Result:
    """Never runs unless the name is linked: no name is offered."""
    raise NodeFailed(f"there is no model {ckpt_name!r}: the built-in engine has none")


@pure(
    Interface(
        "KSamplerSelect",
        "KSamplerSelect",
        "comfy_extras.nodes_custom_sampler",
        "model/sampling/samplers",
        inputs={"sampler_name": choice(*SAMPLERS)},
        outputs=("SAMPLER",),
    )
)
def select_sampler(sampler_name: str) -> str:
    return sampler_name


NODES = (load_checkpoint, select_sampler)
