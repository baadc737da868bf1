/** The effect page in the console, with the effect's title, description, price, catalog settings
 * and fixed values. */

import { useEffect, useState } from "react"
import { Link } from "wouter"
import { type Act, api, cache, useAct, useQuery } from "@/api"
import type { AdminEffectAnswer, WorkflowDetail } from "@/api/schema"
import { EffectState } from "@/pages/effects/EffectState"
import { notifyFailed } from "@/pages/jobs/BulkBar"
import { useLeaveWarning } from "@/pages/workflows/useLeaveWarning"
import {
  Button,
  Check,
  Crumb,
  Empty,
  ErrorNote,
  Field,
  LinkButton,
  Loaded,
  Page,
  Panel,
  Skeleton,
  TextArea,
  toast,
} from "@/ui"
import { words } from "@/words/en/effects"
import { CustomerView } from "./CustomerView"
import { Examples } from "./Examples"
import { bodyOf, type Face, faceOf, isChanged, isMain, keepUnsaved, mistakesOf, unsavedOf } from "./face"
import { Values } from "./Values"
import "./one-effect.css"

export default function OneEffectPage({ slug }: { slug: string }) {
  const path = `/api/admin/effects/${encodeURIComponent(slug)}`
  const effect = useQuery<AdminEffectAnswer>(path)
  const of = effect.data?.workflow_slug
  const workflow = useQuery<WorkflowDetail>(of ? `/api/admin/workflows/${encodeURIComponent(of)}` : null)
  if (effect.error?.status === 404)
    return (
      <Page title={words.notFound}>
        <Empty title={words.notFound} act={<LinkButton href="/console/effects">{words.all}</LinkButton>} />
      </Page>
    )
  if (effect.data && workflow.data)
    return <Whole key={effect.data.id} effect={effect.data} workflow={workflow.data} path={path} />
  return (
    <Page title={words.oneTitle(slug)} head={slug}>
      <Loaded<unknown> query={effect.error ? effect : workflow} skeleton={<Skeleton height="600px" />}>
        {() => null}
      </Loaded>
    </Page>
  )
}

interface WholeProps {
  effect: AdminEffectAnswer
  workflow: WorkflowDetail
  path: string
}

function Whole({ effect, workflow, path }: WholeProps) {
  const [face, setFace] = useState<Face>(() => unsavedOf(effect.slug) ?? faceOf(effect))
  const [saved, setSaved] = useState(effect)
  if (saved !== effect) {
    // If another operator has changed the effect in the meantime, the form is updated, unless it
    // contains unsaved changes.
    setSaved(effect)
    if (!isChanged(face, saved)) setFace(faceOf(effect))
  }
  const change = (changes: Partial<Face>) => setFace((before) => ({ ...before, ...changes }))
  const isDirty = isChanged(face, effect)
  const mistakes = mistakesOf(face)
  const save = useSave(path, face, setFace)
  useLeaveWarning(isDirty)
  useEffect(() => keepUnsaved(effect.slug, isDirty ? face : null), [effect.slug, isDirty, face])
  const hasFile = workflow.properties.some(isMain)
  return (
    <Page
      className="one-effect"
      title={words.oneTitle(effect.title)}
      head={effect.title}
      aside={<EffectState isPublished={effect.published} pill />}
      actions={
        <Acts
          effect={effect}
          path={path}
          save={save}
          isDirty={isDirty}
          onUndo={() => setFace(faceOf(effect))}
          isWrong={Object.keys(mistakes).length > 0}
        />
      }
    >
      <Crumb href="/console/effects" list={words.title}>
        <span className="mono">{effect.slug}</span>
      </Crumb>
      {save.error && <ErrorNote error={save.error} />}
      <div className="one-effect-parts">
        <div className="stack">
          <Panel title={words.read}>
            <div className="one-effect-form">
              <Field
                label={words.name}
                value={face.title}
                maxLength={200}
                error={mistakes.title}
                onChange={(event) => change({ title: event.target.value })}
              />
              <TextArea
                label={words.description}
                value={face.description}
                maxLength={10_000}
                onChange={(event) => change({ description: event.target.value })}
              />
              <Field
                label={words.tags}
                hint={words.tagsHint}
                value={face.tags}
                onChange={(event) => change({ tags: event.target.value })}
              />
            </div>
          </Panel>
          <Examples effect={effect} path={path} />
          <Values properties={workflow.properties} face={face} onChange={change} />
          <Terms face={face} mistakes={mistakes} hasFile={hasFile} onChange={change} />
          <Version workflow={workflow} />
        </div>
        <CustomerView effect={effect} properties={workflow.properties} face={face} />
      </div>
    </Page>
  )
}

function useSave(path: string, face: Face, setFace: (face: Face) => void) {
  return useAct(async (isPublished: boolean | null) => {
    const body = { ...bodyOf(face), ...(isPublished === null ? {} : { published: isPublished }) }
    const answer = await api.patch<AdminEffectAnswer>(path, body)
    put(path, answer)
    setFace(faceOf(answer))
    toast({ title: isPublished ? words.isPublished(answer.title) : words.saved })
  })
}

function put(path: string, answer: AdminEffectAnswer): void {
  cache.set<AdminEffectAnswer>(path, () => answer)
  cache.invalidate("/api/admin/effects")
  cache.invalidate("/api/effects")
}

interface ActsProps {
  effect: AdminEffectAnswer
  path: string
  save: Act<[boolean | null], void>
  isDirty: boolean
  onUndo: () => void
  isWrong: boolean
}

function Acts({ effect, path, save, isDirty, onUndo, isWrong }: ActsProps) {
  const unpublish = useAct(() => setPublished(path, effect, false))
  return (
    <>
      {isDirty && (
        <Button kind="ghost" icon="undo" onClick={onUndo}>
          {words.undoChanges}
        </Button>
      )}
      {effect.published && (
        <LinkButton icon="person" href={`/effects/${effect.slug}`}>
          {words.open}
        </LinkButton>
      )}
      {effect.published && (
        <Button busy={unpublish.isRunning} onClick={() => void unpublish.run()}>
          {words.unpublish}
        </Button>
      )}
      <Button
        kind={effect.published ? "go" : "plain"}
        busy={save.isRunning}
        offReason={isWrong ? words.mend : !isDirty && words.nothingChanged}
        onClick={() => void save.run(null)}
      >
        {words.save}
      </Button>
      {!effect.published && (
        <Button
          kind="go"
          busy={save.isRunning}
          offReason={isWrong && words.mend}
          onClick={() => void save.run(true)}
        >
          {isDirty ? words.saveAndPublish : words.publish}
        </Button>
      )}
      {unpublish.error && <ErrorNote error={unpublish.error} />}
    </>
  )
}

async function setPublished(path: string, effect: AdminEffectAnswer, isPublished: boolean): Promise<void> {
  put(path, await api.post<AdminEffectAnswer>(`${path}/${isPublished ? "publish" : "withdraw"}`))
  if (isPublished) {
    toast({ title: words.isPublished(effect.title) })
    return
  }
  toast({
    title: words.isUnpublished(effect.title),
    text: words.unpublishedText,
    state: "cancelled",
    act: { label: words.undo, run: () => void setPublished(path, effect, true).catch(notifyFailed) },
  })
}

interface TermsProps {
  face: Face
  mistakes: ReturnType<typeof mistakesOf>
  hasFile: boolean
  onChange: (changes: Partial<Face>) => void
}

function Terms({ face, mistakes, hasFile, onChange }: TermsProps) {
  return (
    <Panel title={words.terms}>
      <div className="one-effect-form is-wide">
        <Field
          label={words.price}
          hint={words.priceHint}
          error={mistakes.price}
          type="number"
          inputMode="numeric"
          min={0}
          step={1}
          value={face.price}
          onChange={(event) => onChange({ price: event.target.value })}
        />
        <Field
          label={words.stage}
          value={face.stage}
          onChange={(event) => onChange({ stage: event.target.value })}
        />
        {hasFile && (
          <>
            <Field
              label={words.upload}
              hint={words.uploadHint}
              error={mistakes.upload}
              type="number"
              inputMode="decimal"
              min={0}
              step="any"
              value={face.upload}
              onChange={(event) => onChange({ upload: event.target.value })}
            />
            <Field
              label={words.mediaTypes}
              hint={words.mediaTypesHint}
              value={face.mediaTypes}
              onChange={(event) => onChange({ mediaTypes: event.target.value })}
            />
          </>
        )}
        <Check
          label={words.keepMetadata}
          checked={face.keepMetadata}
          onChange={(event) => onChange({ keepMetadata: event.target.checked })}
        />
        <Check
          label={words.reuse}
          checked={face.reuse}
          onChange={(event) => onChange({ reuse: event.target.checked })}
        />
      </div>
    </Panel>
  )
}

function Version({ workflow }: { workflow: WorkflowDetail }) {
  const page = `/console/workflows/${workflow.slug}`
  return (
    <Panel title={words.version}>
      <div className="one-effect-version">
        <span>
          <Link href={page}>{workflow.slug}</Link>,{" "}
          {words.versionText(workflow.version, workflow.versions.length)}.{" "}
          <span className="faint">{words.versionHint}</span>
        </span>
        <LinkButton size="small" href={`${page}?part=versions`}>
          {words.versions}
        </LinkButton>
      </div>
    </Panel>
  )
}
