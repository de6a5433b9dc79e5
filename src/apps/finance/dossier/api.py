"""The route of dossiers."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import structlog
from fastapi import Request
from fastapi.responses import Response

from apps.finance.dossier import service
from apps.finance.dossier.signing import Signer
from apps.shared.canonical import encode
from duly.auth.http import require
from duly.auth.principals import Principal
from duly.db import Database
from duly.http import RequestTx, Router
from duly.settings import Settings

log = structlog.get_logger("apps.dossier")
SCOPE, ROLE = "compliance:resolve", "COMPLIANCE_OFFICER"
Officer = Annotated[Principal, require(SCOPE, ROLE)]
router = Router(prefix="/v1", tags=["dossier"])
ANSWER = {"description": "The dossier.", "content": {"application/json": {"schema": {"type": "object"}}}}


@router.get("/payments/{payment_id}/dossier", response_class=Response, responses={200: ANSWER})
async def read_dossier(payment_id: UUID, caller: Officer, tx: RequestTx, request: Request) -> Response:
    """Everything that is known of a payment, signed; ``duly-dossier verify`` checks it without us. Nobody gets that of
    a payment of their own: there may be cases in it. The audit keeps who got it.
    """
    settings: Settings = getattr(request.app.state, "settings", None) or Settings()
    db: Database = request.app.state.db
    async with db.transaction() as snapshot:  # it ends before the request's own begins: no session waits for another
        made = await service.make_dossier(snapshot, payment_id, Signer.open(settings), reader=caller.subject)
    await service.record_export(tx, made, actor=caller.subject)
    log.info("dossier_made", payment_id=str(payment_id), head=made["manifest"]["head"])
    headers = {
        "Content-Disposition": f'attachment; filename="dossier-{payment_id}.json"',
        "Cache-Control": "no-store",
    }
    return Response(encode(made), media_type="application/json", headers=headers)
