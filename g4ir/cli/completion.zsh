# zsh completion of g4ir @version@; `source <(g4ir completion zsh)` after compinit loads it
_g4ir_rows=(@rows@)
_g4ir() {
    local row word key command tab=$'\t'
    local -a found=() values=() options=() paths=()
    for word in "${(@)words[2,CURRENT-1]}"; do
        key=${command:+$command }$word
        (( ${(M)#_g4ir_rows:#"$key$tab"*} )) && command=$key
    done
    key=$words[CURRENT-1]
    if [[ $words[CURRENT] == --*=* ]]; then key=${words[CURRENT]%%=*}; compset -P '*='; fi
    found=("${(@M)_g4ir_rows:#"$command$tab$key$tab"*}")
    (( $#found )) || found=("${(@M)_g4ir_rows:#"$command$tab$tab"*}")
    for row in "${(@)found}"; do
        row=("${(@ps:$tab:)row}")
        case $row[3] in
            "<file>") paths=(_files) ;;
            "<folder>") paths=(_files -/) ;;
            -*) options+=("$row[3]:$row[4]") ;;
            ?*) values+=("${row[3]//:/\\:}${row[4]:+:$row[4]}") ;;
        esac
    done
    _describe -o option options
    _describe value values
    (( $#paths )) && $paths
}
compdef _g4ir g4ir
