/** The pipeline page, with the pipeline's steps and runs, where users can start another run. */

import { useState } from "react"
import { Link, useLocation } from "wouter"
import { api, cache, useQuery } from "@/api"
import type { PipelineAnswer } from "@/api/schema"
import { Button, Confirm, Empty, LinkButton, Loaded, Menu, Page, Skeleton, toast } from "@/ui"
import { JsonTree } from "@/ui/JsonTree"
import { words } from "@/words/en/pipelines"
import { Runs } from "../pipelines/Runs"
import { StartRun } from "../pipelines/StartRun"
import { type StepFacts, stepsOf } from "../pipelines/start"
import "../pipelines/pipelines.css"

export default function Pipeline({ slug }: { slug: string }) {
  const pipeline = useQuery<PipelineAnswer>(`/api/pipelines/${encodeURIComponent(slug)}`)
  const [dialog, setDialog] = useState<"start" | "remove" | null>(null)
  const close = () => setDialog(null)
  const [, go] = useLocation()
  if (pipeline.error && [404, 422].includes(pipeline.error.status) && !pipeline.data)
    return (
      <Page title={words.pipeline.missing}>
        <Empty
          title={words.pipeline.missing}
          act={
            <LinkButton kind="go" href="/pipelines">
              {words.title}
            </LinkButton>
          }
        >
          {words.pipeline.missingText}
        </Empty>
      </Page>
    )
  const answer = pipeline.data
  return (
    <Page
      title={answer?.name ?? words.pipelines}
      className="pipelines"
      actions={
        answer && (
          <>
            <Button kind="go" icon="play" onClick={() => setDialog("start")}>
              {words.start.open}
            </Button>
            <Menu
              label={words.run.more}
              items={[
                {
                  key: "remove",
                  label: words.pipeline.remove,
                  icon: "trash",
                  danger: true,
                  run: () => setDialog("remove"),
                },
              ]}
            />
          </>
        )
      }
    >
      <p className="pipelines-back">
        <Link href="/pipelines" className="link">
          {words.title}
        </Link>
      </p>
      <Loaded query={pipeline} skeleton={<Skeleton height="320px" />}>
        {(shown) => (
          <>
            <h2 className="pipelines-head">{words.pipeline.steps}</h2>
            <ol className="pipelines-steps">
              {stepsOf(shown.document).map((step, number) => (
                <Step key={step.name} step={step} number={number} />
              ))}
            </ol>
            <h2 className="pipelines-head">{words.runs}</h2>
            <Runs pipelineId={shown.id} />
            <details className="pipelines-document">
              <summary>{words.pipeline.document}</summary>
              <JsonTree value={shown.document} openLevels={3} />
            </details>
            <StartRun pipeline={shown} open={dialog === "start"} onClose={close} />
            <Confirm
              open={dialog === "remove"}
              onClose={close}
              title={words.pipeline.removeTitle(shown.name)}
              act={words.pipeline.remove}
              onConfirm={async () => {
                await api.delete(`/api/pipelines/${shown.id}`)
                cache.invalidate("/api/pipelines?")
                toast({ title: words.pipeline.removed(shown.name) })
                go("/pipelines")
              }}
            >
              {words.pipeline.removeText}
            </Confirm>
          </>
        )}
      </Loaded>
    </Page>
  )
}

function Step({ step, number }: { step: StepFacts; number: number }) {
  const { pipeline } = words
  const facts = [number === 0 ? pipeline.base : pipeline.perParent(step.children)]
  if (step.keep !== null) facts.push(pipeline.keep(step.keep))
  if (step.judge !== null) facts.push(pipeline.judge(step.judge))
  else if (step.needsApproval) facts.push(pipeline.approval)
  return (
    <li className="panel">
      <strong>
        <span className="mono faint">{number + 1}</span> {step.name}
      </strong>
      <span className="mono cut-text">{step.work}</span>
      <span className="faint">{facts.join(", ")}</span>
    </li>
  )
}
