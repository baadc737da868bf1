/** Shows the operators of this installation, and its settings. */

import { type FormEvent, useMemo, useState } from "react"
import { api, cache, useAct, useAuditNews, useQuery, useRoleReason, useSession } from "@/api"
import type {
  MadeOperator,
  OperatorAnswer,
  Operators,
  Role,
  SettingAnswer,
  SettingsAnswer,
} from "@/api/schema"
import {
  Badge,
  Button,
  Check,
  Confirm,
  CopyId,
  count,
  Dialog,
  Empty,
  ErrorNote,
  Field,
  Loaded,
  Page,
  Panel,
  Skeleton,
  Time,
  toast,
} from "@/ui"
import { type ListColumn, ListTable } from "@/ui/ListTable"
import { ShownOnce } from "@/ui/ShownOnce"
import { words as common } from "@/words/en/common"
import { words } from "@/words/en/settings"
import "./settings.css"

const OPERATORS = "/api/admin/operators"
const ROLES = ["viewer", "operator", "owner"] as const

export default function SettingsPage() {
  const settings = useQuery<SettingsAnswer>("/api/admin/settings")
  return (
    <Page
      className="settings"
      title={words.title}
      aside={settings.data && <Badge>{words.version(settings.data.version)}</Badge>}
    >
      <People />
      <Loaded query={settings} skeleton={<Skeleton height="60vh" />}>
        {(answer) => <CurrentSettings settings={answer.settings} />}
      </Loaded>
    </Page>
  )
}

function People() {
  const operators = useQuery<Operators>(OPERATORS)
  useAuditNews(operators.reload)
  const [isNew, setNew] = useState(false)
  const [created, setCreated] = useState<MadeOperator | null>(null)
  const offReason = useRoleReason("owner")
  const add = (kind: "ink" | "go", size: "small" | "normal") => (
    <Button kind={kind} size={size} icon="plus" offReason={offReason} onClick={() => setNew(true)}>
      {words.operators.add}
    </Button>
  )
  return (
    <Panel title={words.operators.title} aside={add("ink", "small")}>
      <Loaded query={operators} skeleton={<Skeleton height="120px" />}>
        {(answer) =>
          answer.operators.length > 0 ? (
            <OperatorList operators={answer.operators} offReason={offReason} />
          ) : (
            <Empty title={words.operators.none} act={add("go", "normal")}>
              {words.operators.noneText}
            </Empty>
          )
        }
      </Loaded>
      <dl className="settings-roles">
        {ROLES.map((role) => (
          <div key={role}>
            <dt>{words.roles[role].label}</dt>
            <dd>{words.roles[role].may}</dd>
          </div>
        ))}
      </dl>
      <p className="faint settings-first">{words.operators.firstKey}</p>
      {isNew && (
        <NewOperator
          onClose={() => setNew(false)}
          onMade={(operator) => {
            setNew(false)
            setCreated(operator)
          }}
        />
      )}
      {created && (
        <ShownOnce
          text={words.operators.once}
          label={common.once.key}
          secret={created.key}
          onDone={() => setCreated(null)}
        >
          <p>
            <b>{created.name}</b> <span className="faint">{words.roles[created.role].label}</span>
          </p>
        </ShownOnce>
      )}
    </Panel>
  )
}

interface OperatorListProps {
  operators: readonly OperatorAnswer[]
  offReason: string | null
}

function OperatorList({ operators, offReason }: OperatorListProps) {
  const me = useSession().data?.operator ?? null
  const [showsOld, setShowsOld] = useState(false)
  const [removing, setRemoving] = useState<OperatorAnswer | null>(null)
  const old = operators.filter((operator) => operator.revoked_at)
  const listed = showsOld ? operators : operators.filter((operator) => !operator.revoked_at)
  const isMe = (operator: OperatorAnswer | null) => operator !== null && me === `operator:${operator.name}`
  const acts = (operator: OperatorAnswer) =>
    operator.revoked_at ? (
      <span className="faint">
        {words.operators.revoked} <Time at={operator.revoked_at} />
      </span>
    ) : (
      <Button
        kind="ghost"
        size="small"
        className="is-danger"
        aria-description={operator.name}
        offReason={offReason}
        onClick={() => setRemoving(operator)}
      >
        {words.operators.revoke}
      </Button>
    )
  return (
    <>
      <ListTable
        label={words.operators.title}
        columns={operatorColumns(isMe, acts)}
        rows={listed}
        rowKey={(operator) => operator.id}
        isOver={(operator) => operator.revoked_at !== null}
      />
      {old.length > 0 && (
        <p className="settings-old">
          <Button kind="ghost" size="small" onClick={() => setShowsOld(!showsOld)}>
            {showsOld ? words.operators.hideOld : words.operators.showOld(old.length)}
          </Button>
        </p>
      )}
      <Confirm
        open={removing !== null}
        onClose={() => setRemoving(null)}
        title={words.operators.revokeTitle(removing?.name ?? "")}
        act={words.operators.revokeAct}
        onConfirm={async () => {
          if (!removing) return
          await api.post(`${OPERATORS}/${encodeURIComponent(removing.name)}/revoke`)
          toast({ title: words.operators.gone(removing.name) })
          cache.invalidate(isMe(removing) ? "/api/" : OPERATORS)
        }}
      >
        <p>{words.operators.revokeText}</p>
        {isMe(removing) && <p>{words.operators.revokeSelf}</p>}
      </Confirm>
    </>
  )
}

function operatorColumns(
  isMe: (operator: OperatorAnswer) => boolean,
  acts: (operator: OperatorAnswer) => React.ReactNode,
): ListColumn<OperatorAnswer>[] {
  const { columns, by, neverUsed, you } = words.operators
  return [
    {
      key: "name",
      title: columns.name,
      head: true,
      cell: (operator) => (
        <>
          {operator.name} {isMe(operator) && <Badge>{you}</Badge>}
        </>
      ),
    },
    { key: "role", title: columns.role, cell: (operator) => words.roles[operator.role].label },
    { key: "key", title: columns.key, cell: (operator) => <span className="mono">{operator.prefix}…</span> },
    {
      key: "made",
      title: columns.made,
      cell: (operator) => (
        <>
          <Time at={operator.created_at} />{" "}
          <span className="faint">
            {by} {operator.created_by}
          </span>
        </>
      ),
    },
    {
      key: "used",
      title: columns.used,
      cell: (operator) => (operator.last_used_at ? <Time at={operator.last_used_at} /> : neverUsed),
    },
    { key: "acts", title: columns.acts, acts: true, cell: acts },
  ]
}

function isName(text: string): boolean {
  return /^[A-Za-z0-9][A-Za-z0-9._@-]{0,99}$/.test(text) && text !== "admin"
}

interface NewOperatorProps {
  onClose: () => void
  onMade: (operator: MadeOperator) => void
}

function NewOperator({ onClose, onMade }: NewOperatorProps) {
  const { form } = words.operators
  const [name, setName] = useState("")
  const [role, setRole] = useState<Role>("operator")
  const [isChecked, setChecked] = useState(false)
  const add = useAct(async () => {
    const operator = await api.post<MadeOperator>(OPERATORS, { name: name.trim(), role })
    cache.invalidate(OPERATORS)
    onMade(operator)
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    setChecked(true)
    if (isName(name.trim())) void add.run()
  }
  return (
    <Dialog
      open
      onClose={onClose}
      title={form.title}
      actions={
        <>
          <Button onClick={onClose}>{common.cancel}</Button>
          <Button kind="go" type="submit" form="new-operator" busy={add.isRunning}>
            {form.act}
          </Button>
        </>
      }
    >
      <form id="new-operator" className="stack" noValidate onSubmit={submit}>
        <Field
          label={form.name}
          hint={form.nameHint}
          placeholder={form.namePlaceholder}
          error={isChecked && !isName(name.trim()) && form.nameWrong}
          value={name}
          maxLength={100}
          autoComplete="off"
          spellCheck={false}
          autoFocus
          onChange={(event) => setName(event.target.value)}
        />
        <fieldset className="settings-choose">
          <legend>{form.role}</legend>
          {ROLES.map((option) => (
            <label key={option} className="check">
              <input type="radio" name="role" checked={role === option} onChange={() => setRole(option)} />
              <span>
                <b>{words.roles[option].label}</b> <span className="faint">{words.roles[option].may}</span>
              </span>
            </label>
          ))}
        </fieldset>
        {add.error && <ErrorNote error={add.error} />}
      </form>
    </Dialog>
  )
}

function CurrentSettings({ settings }: { settings: readonly SettingAnswer[] }) {
  const { inForce } = words
  const [text, setText] = useState("")
  const [isChanged, setChanged] = useState(false)
  const rows = useMemo(() => {
    const query = text.trim().toLowerCase()
    return settings.filter(
      (setting) =>
        (!isChanged || !setting.is_default) &&
        (setting.variable.toLowerCase().includes(query) || setting.remark.toLowerCase().includes(query)),
    )
  }, [settings, text, isChanged])
  const isAsItComes = isChanged && !text.trim()
  return (
    <Panel title={inForce.title} aside={<Badge>{count(rows.length)}</Badge>}>
      <div className="settings-tools">
        <p className="quiet">{inForce.text}</p>
        <Field
          label={inForce.find}
          hideLabel
          type="search"
          icon="search"
          placeholder={inForce.findPlaceholder}
          value={text}
          onChange={(event) => setText(event.target.value)}
        />
        <Check
          label={inForce.changed}
          checked={isChanged}
          onChange={(event) => setChanged(event.target.checked)}
        />
      </div>
      {rows.length > 0 ? (
        <ListTable label={inForce.title} columns={SETTINGS} rows={rows} rowKey={(setting) => setting.name} />
      ) : (
        <Empty
          title={isAsItComes ? inForce.noneSet : inForce.noFit}
          act={
            <Button
              onClick={() => {
                setText("")
                setChanged(false)
              }}
            >
              {inForce.showAll}
            </Button>
          }
        >
          {isAsItComes && inForce.noneSetText}
        </Empty>
      )}
    </Panel>
  )
}

/** Shown instead of a secret. */
const MASK = "(set)"
const SETTINGS: ListColumn<SettingAnswer>[] = [
  {
    key: "variable",
    title: words.inForce.columns.variable,
    head: true,
    cell: (setting) => <CopyId id={setting.variable} whole />,
  },
  {
    key: "value",
    title: words.inForce.columns.value,
    cell: (setting) => (
      <span className={setting.is_default ? "mono" : "mono settings-set"}>
        {valueText(setting.value)}{" "}
        {!setting.is_default && setting.value !== MASK && <Badge>{words.inForce.set}</Badge>}
      </span>
    ),
  },
  { key: "remark", title: words.inForce.columns.remark, cell: (setting) => setting.remark },
]

function valueText(value: SettingAnswer["value"]) {
  if (value === "") return <span className="faint">{words.inForce.empty}</span>
  if (typeof value === "boolean") return value ? words.inForce.yes : words.inForce.no
  return typeof value === "number" ? count(value) : value
}
