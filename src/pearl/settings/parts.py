"""The parts of pearl: names -> methods, backbones, data sources, rank rules. Listing them imports none."""

from pearl.settings.registry import Registry

METHODS = Registry(
    "method",
    "methods",
    {
        "pearl": "pearl.methods.pearl:Pearl",
        "isolation": "pearl.methods.bounds.isolation:Isolation",
        "finetune": "pearl.methods.bounds.finetune:Finetune",
        "joint": "pearl.methods.bounds.joint:Joint",
        "er": "pearl.methods.rehearsal.er:Er",
        "er_ace": "pearl.methods.rehearsal.er_ace:ErAce",
        "derpp": "pearl.methods.rehearsal.derpp:DerPlusPlus",
        "co2l": "pearl.methods.rehearsal.co2l:Co2L",
        "ocdnet": "pearl.methods.rehearsal.ocdnet:OcdNet",
        "trire": "pearl.methods.rehearsal.trire:TriRe",
        "tamil": "pearl.methods.rehearsal.tamil:Tamil",
        "agile": "pearl.methods.rehearsal.agile:Agile",
        "lwf": "pearl.methods.regularization.lwf:Lwf",
        "ewc": "pearl.methods.regularization.ewc:OnlineEwc",
        "seqlora": "pearl.methods.adapters.seqlora:SeqLora",
        "inflora": "pearl.methods.adapters.inflora:InfLoRA",
        "sdlora": "pearl.methods.adapters.sdlora:SdLora",
        "e2lora": "pearl.methods.adapters.e2lora:E2Lora",
        "slcapp": "pearl.methods.adapters.slcapp:SlcaPlusPlus",
        "sldc": "pearl.methods.adapters.sldc:Sldc",
        "clora": "pearl.methods.adapters.clora:CLora",
        "lae": "pearl.methods.adapters.lae:Lae",
        "sema": "pearl.methods.adapters.sema:Sema",
        "dia": "pearl.methods.adapters.dia:Dia",
        "ada": "pearl.methods.adapters.ada:Ada",
        "ssiat": "pearl.methods.adapters.ssiat:Ssiat",
        "rsiat": "pearl.methods.adapters.rsiat:Rsiat",
        "ease": "pearl.methods.adapters.ease:Ease",
        "l2p": "pearl.methods.prompts.l2p:L2P",
        "coda_prompt": "pearl.methods.prompts.coda_prompt:CodaPrompt",
        "dualprompt": "pearl.methods.prompts.dualprompt:DualPrompt",
        "sprompts": "pearl.methods.prompts.sprompts:SiPrompts",
        "lgcl": "pearl.methods.prompts.lgcl:Lgcl",
        "hide": "pearl.methods.prompts.hide:HidePrompt",
        "dualprompt_pgp": "pearl.methods.prompts.pgp:DualPromptPgp",
        "l2p_pgp": "pearl.methods.prompts.pgp:L2PPgp",
        "evoprompt": "pearl.methods.prompts.evoprompt:EvoPrompt",
        "cprompt": "pearl.methods.prompts.cprompt:CPrompt",
        "convprompt": "pearl.methods.prompts.convprompt:ConvPrompt",
        "pnn": "pearl.methods.sparse.pnn:Progressive",
        "packnet": "pearl.methods.sparse.packnet:PackNet",
        "cpg": "pearl.methods.sparse.cpg:Cpg",
        "pae": "pearl.methods.sparse.pae:Pae",
        "clnp": "pearl.methods.sparse.clnp:Clnp",
        "nispa": "pearl.methods.sparse.nispa:Nispa",
        "sparcl_ewc": "pearl.methods.sparse.sparcl:SparClEwc",
        "ncm": "pearl.methods.prototypes.ncm:NearestMean",
        "fetril": "pearl.methods.prototypes.fetril:FeTril",
        "fecam": "pearl.methods.prototypes.fecam:FeCam",
        "pass": "pearl.methods.prototypes.pass_:PASS",
        "il2a": "pearl.methods.prototypes.il2a:IL2A",
        "ssre": "pearl.methods.prototypes.ssre:SSRE",
        "efcpp": "pearl.methods.prototypes.efcpp:EfcPlusPlus",
        "seed": "pearl.methods.prototypes.seed:Seed",
        "apr": "pearl.methods.prototypes.apr:Apr",
        "aper": "pearl.methods.prototypes.aper:Aper",
        "ranpac": "pearl.methods.prototypes.ranpac:RanPac",
        "loranpac": "pearl.methods.prototypes.loranpac:LoRanPac",
        "klda": "pearl.methods.prototypes.klda:Klda",
    },
    base="pearl.methods.base:Method",
)

BACKBONES = Registry(
    "backbone",
    "backbones",
    {
        "resnet18": "pearl.nn.resnet:resnet18",
        "bsc": "pearl.nn.bsconv:bsc",
        "convnet": "pearl.nn.convnet:convnet",
        "timm/*": "pearl.nn.timm:timm_backbone",
    },
)

SOURCES = Registry(
    "data source",
    "data",
    {
        "digits": "pearl.data.sources:digits",
        "cifar100": "pearl.data.sources:cifar100",
        "tinyimagenet": "pearl.data.sources:tinyimagenet",
        "imagenet_r": "pearl.data.sources:imagenet_r",
        "folder": "pearl.data.sources:folder",
        "npz": "pearl.data.sources:npz",
        "torchvision/*": "pearl.data.sources:vision",
        "hf/*": "pearl.data.sources:hugging_face",
    },
)

CLASSIFIERS = Registry(
    "classifier",
    "classifiers",
    {
        "heads": "pearl.methods.common.subnetworks:Heads",
        "statistics": "pearl.methods.common.by_statistics:Statistics",
    },
)

RANK_RULES = Registry(
    "rank rule",
    "rank_rules",
    {
        "paper": "pearl.nn.rank_rules:PaperRule",
        "fixed": "pearl.nn.rank_rules:FixedRule",
        "energy": "pearl.nn.rank_rules:EnergyRule",
        "random": "pearl.nn.rank_rules:RandomRule",
        "even": "pearl.nn.rank_rules:EvenRule",
        "adalora": "pearl.nn.dynamic.pruned:AdaLoraRule",
        "dora": "pearl.nn.dynamic.pruned:DoraRule",
        "codyra": "pearl.nn.dynamic.codyra:CodyraRule",
        "dylora": "pearl.nn.dynamic.dylora:DyloraRule",
    },
)

LEARNERS = Registry(
    "online learner",
    "learners",
    {
        "pearl": "pearl.online.online_pearl:OnlinePearl",
        "slda": "pearl.online.frozen:Slda",
        "ncm": "pearl.online.frozen:OnlineNearestMean",
        "ranpac": "pearl.online.frozen:OnlineRanPac",
        "er": "pearl.online.rehearsal:OnlineEr",
        "derpp": "pearl.online.rehearsal:OnlineDerPlusPlus",
        "flyprompt": "pearl.online.flyprompt:FlyPrompt",
    },
)
