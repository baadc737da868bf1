/** Lists all tenants. */

import { type FormEvent, useEffect, useMemo, useState } from "react"
import { useLocation } from "wouter"
import { api, cache, useAct, useAuditNews, useQuery, useRoleReason } from "@/api"
import type { MadeTenant, TenantAnswer, Tenants } from "@/api/schema"
import { putConsoleCounts } from "@/app/consoleCounts"
import {
  Badge,
  Button,
  bytes,
  CopyId,
  count,
  Dialog,
  Empty,
  ErrorNote,
  Field,
  Page,
  Status,
  Time,
} from "@/ui"
import { ShownOnce } from "@/ui/ShownOnce"
import { type Column, Table } from "@/ui/Table"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/tenants"
import { ICONS, isEmail, matching, stateOfTenant } from "./tenants"
import "./tenants.css"

const PATH = "/api/admin/tenants"

export default function TenantsPage() {
  const tenants = useQuery<Tenants>(PATH)
  const all = tenants.data?.tenants
  const [text, setText] = useState("")
  const [isNew, setNew] = useState(false)
  const [created, setCreated] = useState<MadeTenant | null>(null)
  const [, go] = useLocation()
  const offReason = useRoleReason("operator")
  const rows = useMemo(() => all && matching(all, text), [all, text])
  useAuditNews(tenants.reload)
  useEffect(() => {
    if (all) putConsoleCounts({ tenants: all.length })
  }, [all])
  const makeOne = (kind: "ink" | "go") => (
    <Button kind={kind} icon="plus" offReason={offReason} onClick={() => setNew(true)}>
      {words.make}
    </Button>
  )
  return (
    <Page
      fill
      className="tenants"
      title={words.title}
      aside={rows && all && <Badge>{words.count(count(rows.length), count(all.length))}</Badge>}
      actions={makeOne("ink")}
    >
      <Field
        label={words.find}
        hideLabel
        icon="search"
        type="search"
        placeholder={words.findPlaceholder}
        value={text}
        onChange={(event) => setText(event.target.value)}
      />
      {tenants.error && <ErrorNote error={tenants.error} onRetry={tenants.reload} />}
      {(rows || !tenants.error) && (
        <Table
          fill
          label={words.title}
          columns={COLUMNS}
          rows={rows}
          rowKey={(tenant) => tenant.id}
          onOpen={(tenant) => go(`/console/tenants/${tenant.id}`)}
          empty={
            all?.length === 0 ? (
              <Empty title={words.none} act={makeOne("go")}>
                {words.noneText}
              </Empty>
            ) : (
              <Empty title={words.noFit} act={<Button onClick={() => setText("")}>{words.clear}</Button>} />
            )
          }
        />
      )}
      {isNew && (
        <NewTenant
          onClose={() => setNew(false)}
          onMade={(tenant) => {
            setNew(false)
            setCreated(tenant)
          }}
        />
      )}
      {created && (
        <ShownOnce
          title={words.once.title}
          text={words.once.text}
          label={common.once.key}
          secret={created.key}
          act={words.once.act}
          onDone={() => go(`/console/tenants/${created.id}`)}
        />
      )}
    </Page>
  )
}

const { columns } = words
const WIDE_ONLY = { wideOnly: true } as const
const COLUMNS: Column<TenantAnswer>[] = [
  {
    key: "state",
    title: columns.state,
    width: "132px",
    cell: (row) => <Status status={ICONS[stateOfTenant(row)]}>{words.states[stateOfTenant(row)]}</Status>,
  },
  { key: "name", title: columns.name, width: "minmax(120px, 2fr)", cell: (row) => <b>{row.name}</b> },
  { key: "id", title: columns.id, width: "112px", ...WIDE_ONLY, cell: (row) => <CopyId id={row.id} /> },
  {
    key: "queued",
    title: columns.queued,
    width: "minmax(110px, 1fr)",
    ...WIDE_ONLY,
    cell: (row) => limit(row.max_queued, count),
  },
  {
    key: "storage",
    title: columns.storage,
    width: "minmax(110px, 1fr)",
    ...WIDE_ONLY,
    cell: (row) => limit(row.max_storage_bytes, bytes),
  },
  {
    key: "kept",
    title: columns.kept,
    width: "minmax(100px, 1fr)",
    ...WIDE_ONLY,
    cell: (row) =>
      row.retention_days === null ? (
        <span className="faint">{words.asSettings}</span>
      ) : (
        words.days(row.retention_days)
      ),
  },
  {
    key: "pool",
    title: columns.pool,
    width: "minmax(80px, 1fr)",
    ...WIDE_ONLY,
    cell: (row) => <span className="mono">{row.pool}</span>,
  },
  {
    key: "made",
    title: columns.made,
    width: "96px",
    align: "right",
    cell: (row) => (
      <span className="faint">
        <Time at={row.created_at} />
      </span>
    ),
  },
]

function limit(most: number | null, format: (most: number) => string) {
  return most === null ? <span className="faint">{words.asSettings}</span> : words.most(format(most))
}

interface NewTenantProps {
  onClose: () => void
  onMade: (tenant: MadeTenant) => void
}

function NewTenant({ onClose, onMade }: NewTenantProps) {
  const [name, setName] = useState("")
  const [email, setEmail] = useState("")
  const [isChecked, setChecked] = useState(false)
  const isWrong = email.trim() !== "" && !isEmail(email)
  const make = useAct(async () => {
    const tenant = await api.post<MadeTenant>(PATH, { name: name.trim(), email: email.trim() || null })
    cache.invalidate(PATH)
    onMade(tenant)
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setChecked(true)
    if (name.trim() && !isWrong) void make.run()
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={words.form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="new-tenant" busy={make.isRunning}>
            {words.form.act}
          </Button>
        </>
      }
    >
      <form id="new-tenant" className="stack" noValidate onSubmit={submit}>
        <Field
          label={words.form.name}
          hint={words.form.nameHint}
          placeholder={words.form.namePlaceholder}
          error={isChecked && !name.trim() && words.form.nameMissing}
          value={name}
          maxLength={100}
          autoComplete="off"
          autoFocus
          onChange={(event) => setName(event.target.value)}
        />
        <Field
          type="email"
          label={words.form.email}
          hint={words.form.emailHint}
          placeholder={words.form.emailPlaceholder}
          error={isChecked && isWrong && words.form.emailWrong}
          value={email}
          autoComplete="off"
          onChange={(event) => setEmail(event.target.value)}
        />
        {make.error && <ErrorNote error={make.error} />}
      </form>
    </Dialog>
  )
}
