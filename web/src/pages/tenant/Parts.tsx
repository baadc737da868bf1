/** The parts of the tenant's page about the tenant as a whole: its limits, ledger and deletion. */

import { type FormEvent, useState } from "react"
import { Link } from "wouter"
import { api, cache, useAct, useQuery, useRoleReason } from "@/api"
import type { Books, Storage, TenantAnswer, TenantPrompts } from "@/api/schema"
import { TenantTerms } from "@/pages/fleets/Prompts"
import {
  Button,
  bytes,
  count,
  Dialog,
  ErrorNote,
  Field,
  Panel,
  Progress,
  Status,
  shortId,
  Time,
  toast,
} from "@/ui"
import { words as common } from "@/words/en/common"
import { words as prompts } from "@/words/en/prompts"
import { words } from "@/words/en/tenant"
import { changes, limitsOf, type TypedLimits, typedOf } from "./limits"

interface OfTenant {
  tenant: TenantAnswer
  path: string
}

export function Limits({ tenant, path, isGone }: OfTenant & { isGone: boolean }) {
  const { limits } = words
  const storage = useQuery<Storage>(`${path}/storage`).data
  const [isOpen, setOpen] = useState(false)
  const offReason = useRoleReason("operator") ?? (isGone ? words.user.isGone : null)
  return (
    <Panel
      title={limits.title}
      aside={
        <Button size="small" icon="edit" offReason={offReason} onClick={() => setOpen(true)}>
          {limits.change}
        </Button>
      }
    >
      <div className="tenant-body">
        <div className="tenant-storage">
          <p>
            <span>{limits.storage}</span>
            <span className="quiet">
              {storage
                ? limits.storageText(bytes(storage.used_bytes), bytes(storage.max_storage_bytes))
                : "…"}
            </span>
          </p>
          <Progress label={limits.storage} value={storage ? part(storage) : 0} state="ink" />
        </div>
        <dl className="tenant-facts">
          <dt>{limits.queued}</dt>
          <dd>{tenant.max_queued === null ? limits.asSettings : limits.atMost(count(tenant.max_queued))}</dd>
          <dt>{limits.priorities}</dt>
          <dd>{limits.priorityText(count(tenant.min_priority), count(tenant.max_priority))}</dd>
          <dt>{limits.kept}</dt>
          <dd>{tenant.retention_days === null ? limits.asSettings : limits.days(tenant.retention_days)}</dd>
          <dt>{limits.pool}</dt>
          <dd className="mono">{tenant.pool}</dd>
          <dt>{limits.made}</dt>
          <dd>
            <Time at={tenant.created_at} />
          </dd>
        </dl>
      </div>
      {isOpen && <LimitsForm tenant={tenant} path={path} onClose={() => setOpen(false)} />}
    </Panel>
  )
}

function part({ used_bytes, max_storage_bytes }: Storage): number {
  return max_storage_bytes > 0 ? Math.min(1, used_bytes / max_storage_bytes) : 1
}

function LimitsForm({ tenant, path, onClose }: OfTenant & { onClose: () => void }) {
  const { form } = words.limits
  const [typed, setTyped] = useState<TypedLimits>(() => typedOf(tenant))
  const [isChecked, setChecked] = useState(false)
  const ownersOnly = useRoleReason("owner")
  const answer = limitsOf(typed)
  const isWrong = (field: keyof TypedLimits) => isChecked && "wrong" in answer && answer.wrong.has(field)
  const save = useAct(async () => {
    if ("wrong" in answer) return
    for (const change of changes(tenant, answer.limits)) await api.put(`${path}/${change.path}`, change.body)
    cache.invalidate(path)
    toast({ title: words.limits.done })
    onClose()
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setChecked(true)
    if (!("wrong" in answer)) void save.run()
  }
  const field = (key: keyof TypedLimits, label: string, hint: string, wrong: string) => (
    <Field
      label={label}
      hint={hint}
      error={isWrong(key) && wrong}
      value={typed[key]}
      inputMode="decimal"
      autoComplete="off"
      readOnly={Boolean(ownersOnly) && (key === "days" || key === "gigabytes")}
      onChange={(event) => setTyped({ ...typed, [key]: event.target.value })}
    />
  )
  return (
    <Dialog
      open
      onClose={onClose}
      title={form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="limits" busy={save.isRunning}>
            {form.act}
          </Button>
        </>
      }
    >
      <form id="limits" className="stack" noValidate onSubmit={submit}>
        {field("queued", form.queued, form.empty, form.wrong)}
        {field("low", form.low, form.lowHint, form.wrongPriority)}
        {field("high", form.high, form.highHint, form.wrongPriority)}
        {field("days", form.kept, ownersOnly ?? form.empty, form.wrongDays)}
        {field("gigabytes", form.storage, ownersOnly ?? form.empty, form.wrongStorage)}
        {save.error && <ErrorNote error={save.error} />}
      </form>
    </Dialog>
  )
}

/** Shows which fleets and node types the tenant's prompts from ComfyUI clients may use. */
export function Prompts({ path, isGone }: { path: string; isGone: boolean }) {
  const terms = useQuery<TenantPrompts>(`${path}/prompts`).data
  const [isOpen, setOpen] = useState(false)
  const offReason = useRoleReason("operator") ?? (isGone ? words.user.isGone : null)
  const { tenant } = prompts
  const listed = (all: readonly string[] | undefined, none: string) => all?.join(", ") || none
  return (
    <Panel
      title={tenant.title}
      aside={
        <Button size="small" icon="edit" offReason={offReason} onClick={() => setOpen(terms !== undefined)}>
          {tenant.change}
        </Button>
      }
    >
      <div className="tenant-body">
        <p className="quiet">{tenant.text}</p>
        <dl className="tenant-facts">
          <dt>{tenant.fleets}</dt>
          <dd>{terms?.fleets === null ? tenant.any : terms ? listed(terms.fleets, tenant.none) : "…"}</dd>
          <dt>{tenant.allowed}</dt>
          <dd>{terms ? listed(terms.allow, tenant.nothing) : "…"}</dd>
          <dt>{tenant.denied}</dt>
          <dd>{terms ? listed(terms.deny, tenant.nothing) : "…"}</dd>
        </dl>
      </div>
      {isOpen && terms && <TenantTerms terms={terms} path={path} onClose={() => setOpen(false)} />}
    </Panel>
  )
}

export function Ledger({ tenantId }: { tenantId: string }) {
  const { ledger } = words
  const [books, setBooks] = useState<Books | null>(null)
  const check = useAct(async () =>
    setBooks(await api.get<Books>("/api/admin/ledger", { query: { tenant_id: tenantId } })),
  )
  return (
    <Panel
      title={ledger.title}
      aside={
        <Button size="small" busy={check.isRunning} onClick={() => void check.run()}>
          {ledger.act}
        </Button>
      }
    >
      <div className="tenant-body" role="status">
        {check.error && <ErrorNote error={check.error} />}
        {!books && !check.error && <p className="quiet">{ledger.text}</p>}
        {books && (
          <>
            <Status status={books.is_sound ? "succeeded" : "failed"}>
              {books.is_sound ? ledger.sound : ledger.found(books.found)}
            </Status>
            {books.pools_left_out.length > 0 && (
              <p className="quiet">{ledger.leftOut(books.pools_left_out.join(", "))}</p>
            )}
            <ul className="tenant-drifts">
              {books.drifts.map((drift) => (
                <li key={`${drift.fault} ${drift.user_id} ${drift.job_id}`}>
                  {drift.message}{" "}
                  {drift.job_id && (
                    <Link href={`/console/jobs/${drift.job_id}`}>
                      {ledger.job} {shortId(drift.job_id)}
                    </Link>
                  )}
                </li>
              ))}
            </ul>
          </>
        )}
      </div>
    </Panel>
  )
}

export function Erase({ tenant, path }: OfTenant) {
  const { erase } = words
  const [isOpen, setOpen] = useState(false)
  return (
    <Panel title={erase.title}>
      <div className="tenant-body">
        <p className="quiet">{erase.text}</p>
        <p>
          <Button kind="stop" icon="trash" offReason={useRoleReason("owner")} onClick={() => setOpen(true)}>
            {erase.act}
          </Button>
        </p>
      </div>
      {isOpen && <EraseForm tenant={tenant} path={path} onClose={() => setOpen(false)} />}
    </Panel>
  )
}

function EraseForm({ tenant, path, onClose }: OfTenant & { onClose: () => void }) {
  const { erase } = words
  const [typed, setTyped] = useState("")
  const isSame = typed.trim() === tenant.name
  const begin = useAct(async () => {
    const now = await api.post<TenantAnswer>(`${path}/erase`)
    cache.set<TenantAnswer>(path, () => now)
    cache.invalidate("/api/admin/tenants")
    toast({ title: erase.done(tenant.name), state: "running" })
    onClose()
  })
  return (
    <Dialog
      open
      onClose={onClose}
      title={erase.ask(tenant.name)}
      actions={
        <>
          <Button onClick={onClose}>{erase.keep}</Button>
          <Button
            kind="stop"
            type="submit"
            form="erase"
            offReason={!isSame && erase.first}
            busy={begin.isRunning}
          >
            {erase.act}
          </Button>
        </>
      }
    >
      <p className="dialog-text">{erase.text}</p>
      <form
        id="erase"
        noValidate
        onSubmit={(event) => {
          event.preventDefault()
          if (isSame) void begin.run()
        }}
      >
        <Field
          label={erase.type(tenant.name)}
          value={typed}
          autoComplete="off"
          spellCheck={false}
          autoFocus
          onChange={(event) => setTyped(event.target.value)}
        />
      </form>
      {begin.error && <ErrorNote error={begin.error} />}
    </Dialog>
  )
}
