{{/*
What docker-compose.yml says, for this release: variables have their defaults, and addresses the names of the chart's
Services. `freshet up` reads the same file in the same way (services/stack/compose.py).
*/}}
{{- define "freshet.compose" -}}
{{- $hosts := "kafka|redis|inference-server|encoder|candidates|reranker|refresher|generator|gateway|console" -}}
{{- $text := .Files.Get "files/docker-compose.yml" -}}
{{- $text = replace "${FRESHET_REDIS_MAXMEMORY:-1gb}" (printf "%vmb" .Values.redis.maxMemory) $text -}}
{{- $text = regexReplaceAll `\$\{\w+:-([^}]*)\}` $text "${1}" -}}
{{- regexReplaceAll (printf `\b(%s):(\d{5})\b` $hosts) $text (printf "%s-${1}:${2}" .Release.Name) -}}
{{- end }}

{{/*
The workloads of Freshet's own processes, as a YAML list: `name`, `process`, its `part` (a shard of candidates; else 0), the
`service` that leads to it, replicas, and the settings that only it has.
*/}}
{{- define "freshet.workloads" -}}
{{- $processes := .Values.processes -}}
{{- range $process := list "gateway" "encoder" "reranker" "generator" }}
{{- $replicas := (index $processes $process).replicas }}
- {name: {{ $process }}, process: {{ $process }}, part: 0, service: {{ $process }}, min: {{ $replicas.min }}, max: {{ $replicas.max }}, settings: {}}
{{- end }}
- {name: refresher, process: refresher, part: 0, service: refresher, min: {{ $processes.refresher.replicas }}, max: {{ $processes.refresher.replicas }}, settings: {}}
{{- $shards := int $processes.candidates.shards }}
{{- $replicas := $processes.candidates.replicas }}
{{- if gt $shards 1 }}
{{- range $part := until $shards }}
- {name: candidates-{{ $part }}, process: candidates, part: {{ $part }}, service: candidates-{{ $part }}, min: {{ $replicas.min }}, max: {{ $replicas.max }}, settings: {FRESHET_CANDIDATES_SHARD: "{{ $part }}/{{ $shards }}"}}
{{- end }}
{{- else }}
- {name: candidates, process: candidates, part: 0, service: candidates, min: {{ $replicas.min }}, max: {{ $replicas.max }}, settings: {}}
{{- end }}
{{- end }}

{{/* The labels of a pod, which Services and workloads select by: a dict with root, component, part. */}}
{{- define "freshet.labels" -}}
app.kubernetes.io/name: freshet
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .part }}
freshet/part: {{ . | quote }}
{{- end }}
{{- end }}

{{/* An image of Freshet's own, from the name in docker-compose.yml: a dict with root, image. */}}
{{- define "freshet.image" -}}
{{- $name := first (splitList ":" .image) -}}
{{- .root.Values.image.registry }}{{ $name }}:{{ .root.Values.image.tag | default (last (splitList ":" .image)) -}}
{{- end }}

{{/* An environment as Kubernetes writes it, from a dict; what is empty is left out. */}}
{{- define "freshet.environment" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
- {name: {{ $name }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end }}
{{- end }}

{{/* Whom the gateway asks where that is more than one name: shards in their order, and each refresher. */}}
{{- define "freshet.addresses" -}}
{{- $compose := (include "freshet.compose" . | fromYaml).services.gateway.environment -}}
{{- $shards := list -}}
{{- $refreshers := list -}}
{{- $refresherPort := last (splitList ":" $compose.FRESHET_REFRESHER_ADDRESSES) -}}
{{- $candidatesPort := last (splitList ":" $compose.FRESHET_CANDIDATES_ADDRESS) -}}
{{- range include "freshet.workloads" . | fromYamlArray -}}
{{- if eq .process "candidates" -}}
{{- $shards = append $shards (printf "%s-%s:%s" $.Release.Name .service $candidatesPort) -}}
{{- end -}}
{{- end -}}
{{- range $ordinal := until (int .Values.processes.refresher.replicas) -}}
{{- $refreshers = append $refreshers (printf "%s-refresher-%d.%s-refresher:%s" $.Release.Name $ordinal $.Release.Name $refresherPort) -}}
{{- end -}}
FRESHET_CANDIDATES_ADDRESS: {{ join ";" $shards | quote }}
FRESHET_REFRESHER_ADDRESSES: {{ join "," $refreshers | quote }}
{{- end }}
