/** The audit log: search, live updates and export. */

import { type FormEvent, type ReactNode, useEffect, useId, useMemo, useState } from "react"
import { Link, useLocation, useSearch } from "wouter"
import { pathOf, useAuditNews, usePages, useQuery } from "@/api"
import type { Entries, EntryAnswer, Operators, Tenants } from "@/api/schema"
import {
  Button,
  Choices,
  Dialog,
  Empty,
  ErrorNote,
  exactTime,
  Field,
  LinkButton,
  Page,
  Select,
  shortId,
  Time,
} from "@/ui"
import { JsonTree } from "@/ui/JsonTree"
import { type Column, Table } from "@/ui/Table"
import { words } from "@/words/en/audit"
import { words as common } from "@/words/en/common"
import {
  type AuditFilter,
  type AuditKey,
  actorOf,
  filterOf,
  inOneLine,
  placeOf,
  queryOf,
  SPAN_SECONDS,
  searchOf,
} from "./filter"
import "./audit.css"

const PAGE = 200
const PATH = "/console/audit"

export default function AuditPage() {
  const search = useSearch()
  const [, go] = useLocation()
  const filter = useMemo(() => filterOf(search), [search])
  const query = useMemo(() => queryOf(filter, new Date()), [filter])
  const pages = usePages<EntryAnswer, Entries>(
    "/api/admin/audit",
    { ...query, limit: PAGE },
    (answer) => answer.entries,
  )
  const names = useTenantNames(pages.rows)
  const columns = useMemo(() => columnsOf(names), [names])
  const [seen, setSeen] = useState<EntryAnswer | null>(null)
  useAuditNews(pages.first.reload)
  const show = (next: AuditFilter) => {
    const text = searchOf(next)
    go(text ? `${PATH}?${text}` : PATH, { replace: true })
  }
  const isFiltered = searchOf(filter) !== ""
  const { error } = pages.first
  return (
    <Page
      fill
      className="audit"
      title={words.title}
      actions={
        <>
          {isFiltered && (
            <Button kind="ghost" icon="cross" onClick={() => show({})}>
              {words.clear}
            </Button>
          )}
          <Exports query={query} />
        </>
      }
    >
      <Filter filter={filter} tenants={names} onChange={show} />
      {error && <ErrorNote error={error} onRetry={pages.first.reload} />}
      {pages.more.error && <ErrorNote error={pages.more.error} onRetry={() => void pages.more.run()} />}
      {(pages.rows || !error) && (
        <Table
          fill
          label={words.title}
          columns={columns}
          rows={pages.rows}
          rowKey={(entry) => String(entry.id)}
          total={(pages.rows?.length ?? 0) + (pages.hasMore ? 1 : 0)}
          onEnd={() => void pages.more.run()}
          onOpen={setSeen}
          empty={<Nothing isFiltered={isFiltered} onClear={() => show({})} />}
        />
      )}
      {seen && (
        <Entry
          entry={seen}
          tenant={seen.tenant_id && (names.get(seen.tenant_id) ?? shortId(seen.tenant_id))}
          onClose={() => setSeen(null)}
          onOnly={(key, value) => {
            setSeen(null)
            show({ ...filter, [key]: value })
          }}
        />
      )}
    </Page>
  )
}

/** Returns tenants' names by id. If an entry refers to a tenant that isn't in the list yet, the
 * list is read again. */
function useTenantNames(rows: readonly EntryAnswer[] | undefined): ReadonlyMap<string, string> {
  const { data, reload } = useQuery<Tenants>("/api/admin/tenants", { freshSeconds: 60 })
  const names = useMemo(() => new Map(data?.tenants.map((tenant) => [tenant.id, tenant.name])), [data])
  const unknown = data && rows?.find((entry) => entry.tenant_id && !names.has(entry.tenant_id))?.tenant_id
  // biome-ignore lint/correctness/useExhaustiveDependencies: runs once for each unknown tenant
  useEffect(() => {
    if (unknown) reload()
  }, [unknown])
  return names
}

function Nothing({ isFiltered, onClear }: { isFiltered: boolean; onClear: () => void }) {
  if (!isFiltered) return <Empty title={words.none}>{words.noneText}</Empty>
  return (
    <Empty title={words.noFit} act={<Button onClick={onClear}>{words.clear}</Button>}>
      {words.noFitText}
    </Empty>
  )
}

function Exports({ query }: { query: ReturnType<typeof queryOf> }) {
  return (
    <>
      {(["csv", "jsonl"] as const).map((format) => (
        <LinkButton
          key={format}
          icon="download"
          download={`audit.${format}`}
          href={pathOf("/api/admin/audit/export", { ...query, format })}
        >
          {words[format]}
        </LinkButton>
      ))}
    </>
  )
}

function columnsOf(tenants: ReadonlyMap<string, string>): Column<EntryAnswer>[] {
  const { columns } = words
  return [
    {
      key: "time",
      title: columns.time,
      width: "104px",
      cell: (row) => (
        <span className="faint">
          <Time at={row.at} />
        </span>
      ),
    },
    {
      key: "person",
      title: columns.person,
      width: "minmax(96px, 1fr)",
      cell: (row) => <span>{nameOf(row.actor, tenants)}</span>,
    },
    { key: "action", title: columns.action, width: "minmax(96px, 1fr)", cell: (row) => <b>{row.action}</b> },
    {
      key: "subject",
      title: columns.subject,
      width: "minmax(120px, 1.4fr)",
      wideOnly: true,
      cell: (row) => <Subject subject={row.subject} tenants={tenants} />,
    },
    {
      key: "tenant",
      title: columns.tenant,
      width: "minmax(90px, 1fr)",
      wideOnly: true,
      cell: (row) => row.tenant_id && (tenants.get(row.tenant_id) ?? shortId(row.tenant_id)),
    },
    {
      key: "details",
      title: columns.details,
      width: "minmax(140px, 2.4fr)",
      wideOnly: true,
      cell: (row) => <span className="faint">{inOneLine(row.details)}</span>,
    },
  ]
}

/** Replaces a tenant's id with its name, and shortens other ids. */
function nameOf(subject: string, tenants: ReadonlyMap<string, string>): string {
  const at = subject.indexOf(":")
  if (at < 0) return subject
  const [kind, name] = [subject.slice(0, at), subject.slice(at + 1)]
  if (kind === "tenant") return tenants.get(name) ?? shortId(name)
  return `${kind}:${shortId(name)}`
}

function Subject({ subject, tenants }: { subject: string; tenants: ReadonlyMap<string, string> }) {
  const place = placeOf(subject)
  const name = nameOf(subject, tenants)
  return (
    <span className="mono" title={subject}>
      {place ? (
        <Link href={place} tabIndex={-1}>
          {name}
        </Link>
      ) : (
        name
      )}
    </span>
  )
}

interface FilterProps {
  filter: AuditFilter
  tenants: ReadonlyMap<string, string>
  onChange: (filter: AuditFilter) => void
}

function Filter({ filter, tenants, onChange }: FilterProps) {
  const operators = useQuery<Operators>("/api/admin/operators", { freshSeconds: 60 }).data?.operators
  const people = operators?.map((operator) => operator.name) ?? []
  const put = (key: AuditKey, value: string) => onChange({ ...filter, [key]: value.trim() || undefined })
  const options = [
    { value: "", label: words.anyTenant },
    ...[...tenants].map(([value, label]) => ({ value, label })),
  ]
  return (
    <search className="audit-filter" aria-label={words.filter}>
      <Typed
        label={words.person}
        placeholder={words.personHint}
        value={filter.actor ?? ""}
        suggestions={["admin", ...people.map((name) => `operator:${name}`), "sweep", "system"]}
        onCommit={(text) => put("actor", actorOf(text, people))}
      />
      <Typed
        label={words.action}
        placeholder={words.actionHint}
        value={filter.action ?? ""}
        onCommit={(text) => put("action", text)}
      />
      <Typed
        label={words.subject}
        placeholder={words.subjectHint}
        value={filter.subject ?? ""}
        onCommit={(text) => put("subject", text)}
      />
      <Select
        label={words.tenant}
        options={options}
        value={filter.tenant ?? ""}
        onChange={(value) => put("tenant", value)}
      />
      <Times filter={filter} onChange={onChange} />
    </search>
  )
}

const SPANS = (["all", ...Object.keys(SPAN_SECONDS), "own"] as (keyof typeof words.spans)[]).map((value) => ({
  value,
  label: words.spans[value],
}))

function Times({ filter, onChange }: Pick<FilterProps, "filter" | "onChange">) {
  const { since, until } = filter
  const [isOwn, setOwn] = useState(Boolean(since ?? until))
  const value = isOwn ? "own" : ((filter.span ?? "all") as keyof typeof words.spans)
  const choose = (next: keyof typeof words.spans) => {
    setOwn(next === "own")
    const rest = { ...filter, span: undefined, since: undefined, until: undefined }
    onChange(next === "all" || next === "own" ? rest : { ...rest, span: next })
  }
  const moment = (key: "since" | "until") => (
    <Field
      type="datetime-local"
      label={words[key]}
      value={localOf(filter[key])}
      onChange={(event) =>
        onChange({
          ...filter,
          [key]: event.target.value ? new Date(event.target.value).toISOString() : undefined,
        })
      }
    />
  )
  return (
    <>
      <Choices label={words.time} options={SPANS} value={value} onChange={choose} />
      {isOwn && moment("since")}
      {isOwn && moment("until")}
    </>
  )
}

/** Formats a time for the browser's date field, in the user's time zone. */
function localOf(moment: string | undefined): string {
  if (!moment) return ""
  const at = new Date(moment)
  return new Date(at.getTime() - at.getTimezoneOffset() * 60_000).toISOString().slice(0, 16)
}

interface TypedProps {
  label: string
  placeholder: string
  value: string
  suggestions?: readonly string[]
  onCommit: (text: string) => void
}

/** A text field whose value is applied on Enter or when it loses focus. */
function Typed({ label, placeholder, value, suggestions, onCommit }: TypedProps) {
  const [typed, setTyped] = useState<string | null>(null)
  const id = useId()
  const commit = (event?: FormEvent) => {
    event?.preventDefault()
    if (typed !== null && typed.trim() !== value) onCommit(typed)
    setTyped(null)
  }
  return (
    <form onSubmit={commit}>
      <Field
        label={label}
        placeholder={placeholder}
        value={typed ?? value}
        list={suggestions && id}
        autoComplete="off"
        spellCheck={false}
        onChange={(event) => setTyped(event.target.value)}
        onBlur={() => commit()}
      />
      {suggestions && (
        <datalist id={id}>
          {suggestions.map((suggestion) => (
            <option key={suggestion} value={suggestion} />
          ))}
        </datalist>
      )}
    </form>
  )
}

interface EntryProps {
  entry: EntryAnswer
  tenant: string | null
  onClose: () => void
  onOnly: (key: AuditKey, value: string) => void
}

function Entry({ entry, tenant, onClose, onOnly }: EntryProps) {
  const place = placeOf(entry.subject)
  const line = (label: string, value: ReactNode, act?: ReactNode) => (
    <>
      <dt>{label}</dt>
      <dd>
        <span>{value}</span>
        {act}
      </dd>
    </>
  )
  const only = (key: keyof typeof words.only, value: string) => (
    <Button kind="ghost" size="small" onClick={() => onOnly(key, value)}>
      {words.only[key]}
    </Button>
  )
  return (
    <Dialog
      open
      wide
      onClose={onClose}
      title={words.entry(entry.action)}
      actions={
        <>
          <Button onClick={onClose}>{common.close}</Button>
          {place && (
            <LinkButton kind="ink" href={place}>
              {words.open}
            </LinkButton>
          )}
        </>
      }
    >
      <dl className="audit-entry">
        {line(words.exact, exactTime(new Date(entry.at)))}
        {line(words.person, entry.actor, only("actor", entry.actor))}
        {line(words.action, entry.action, only("action", entry.action))}
        {line(words.subject, <span className="mono">{entry.subject}</span>, only("subject", entry.subject))}
        {entry.tenant_id && line(words.tenant, tenant, only("tenant", entry.tenant_id))}
      </dl>
      <JsonTree value={entry.details} openLevels={2} />
    </Dialog>
  )
}
