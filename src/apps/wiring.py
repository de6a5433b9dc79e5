"""The one file that names every context: what ``duly up`` runs."""

from __future__ import annotations

from pathlib import Path

from apps import samples
from apps.birthdays import api as birthdays_api
from apps.birthdays import console as birthdays_console
from apps.birthdays import service as birthdays
from apps.birthdays import workers as birthdays_workers
from apps.commerce import api as commerce_api
from apps.commerce import console as commerce_console
from apps.commerce import workers as commerce_workers
from apps.currencies import api as currencies_api
from apps.currencies import console as currencies_console
from apps.currencies import workers as currencies_workers
from apps.finance.compliance import api as compliance_api
from apps.finance.compliance import console as compliance_console
from apps.finance.compliance import service as compliance
from apps.finance.compliance import workers as compliance_workers
from apps.finance.decisions import api as decisions_api
from apps.finance.decisions import console as decisions_console
from apps.finance.decisions import workers as decisions_workers
from apps.finance.dossier import api as dossier_api
from apps.finance.kyc import api as kyc_api
from apps.finance.kyc import workers as kyc_workers
from apps.finance.kyc.gateways import HttpProvider
from apps.finance.ledger import api as ledger_api
from apps.finance.ledger import console as ledger_console
from apps.finance.ledger import workers as ledger_workers
from apps.finance.notices import workers as notices_workers
from apps.finance.payments import api as payments_api
from apps.finance.payments import console as payments_console
from apps.finance.payments import workers as payments_workers
from apps.finance.payments.gateways import HttpBank
from apps.quality import api as quality_api
from apps.quality import console as quality_console
from apps.quality import workers as quality_workers
from apps.sandbox import bank, catcher, identity, nbp
from apps.transfers import api as transfers_api
from apps.transfers import console as transfers_console
from apps.transfers import workers as transfers_workers
from apps.users import api as users_api
from duly import Duly

BANK, KYC = "bank", "sandbox"
app = Duly()
app.include_migrations(Path(__file__).parent / "migrations", name="apps")

app.include_router(quality_api.router)
quality_workers.register(app)

app.include_router(transfers_api.router)
transfers_workers.register(app)

app.include_router(users_api.create_router(on_registered=birthdays.plan_first, on_deleted=birthdays.drop))
app.include_router(birthdays_api.router)
birthdays_workers.register(app)
app.include_router(catcher.create_router(), development_only=True)

app.include_router(commerce_api.router)
commerce_workers.register(app)

app.include_router(currencies_api.router)
currencies_workers.register(app)
app.include_router(nbp.create_router(), development_only=True)

app.include_router(decisions_api.router)
decisions_workers.register(app)

app.include_router(ledger_api.router)
ledger_workers.register(app)

# Banks are plugged in by name, here and nowhere else.
app.include_router(
    payments_api.create_router({BANK: bank.SECRET}, provider=BANK, on_review=compliance.open_for_payment)
)
payments_workers.register(app, {BANK: HttpBank(BANK)}, on_review_expired=compliance.close_expired)
app.include_router(bank.create_router(), development_only=True)

# So is who explains cases: create_router(copilot), and the same for the console. Without one, the built-in does.
app.include_router(compliance_api.create_router())
compliance_workers.register(app)

notices_workers.register(app)
app.include_router(dossier_api.router)

# Providers of identity checks, too.
app.include_router(kyc_api.create_router({KYC: identity.SECRET}, provider=KYC))
app.include_router(kyc_api.create_hosted_router({KYC: HttpProvider(KYC)}))
kyc_workers.register(app)
app.include_router(identity.create_router(), development_only=True)

for pages in (
    transfers_console, quality_console, birthdays_console, commerce_console, currencies_console, payments_console,
    ledger_console, decisions_console, compliance_console,
):  # fmt: skip
    pages.register(app)

samples.register(app)
