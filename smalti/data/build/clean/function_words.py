"""The most frequent function words of the languages in Latin and Cyrillic letters, for ``language``.

Written for this purpose; nothing is trained or downloaded. A word may be in several languages: it then counts less.
"""
# ruff: noqa: RUF001  (letters of other alphabets are meant)

_LATIN = {
    "en": "the of and to in is that it was for on are as with his they be at one have this from or had by not but "
    "what all were we when your can said there an each which she do how their if will other about out many then "
    "them these so some her would make like him into has two more no than been its who did get may my you i",
    "de": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als auch es an werden aus er "
    "hat dass sie nach wird bei einer um am sind noch wie einem über einen so zum war haben nur oder aber vor "
    "zur bis mehr durch man sein wurde wenn kann diese dieser ich wir ihr mich uns schon unter gegen alle vom "
    "keine ihre seine",
    "fr": "le de la les et des en un du une que est pour qui dans a par plus pas au sur ne se ce il sont avec son "
    "cette ont ou mais comme on tout nous sa fait été aussi leur bien être aux ces elle même ses entre après "
    "dont très sans encore je vous lui était deux si peut où y c'est d'un d'une n'est qu'il l'on j'ai ils elles "
    "leurs notre votre",
    "es": "el la de que y a en un ser se no haber por con su para como estar tener le lo todo pero más hacer o poder "
    "este ir otro ese si me ya los las del una al es son fue era muy sin sobre también hasta hay donde quien "
    "desde cuando entre esta ha está esto porque qué uno ni contra sus nos les han había tiene puede años dos "
    "yo ella",
    "it": "il di che e la in un a per è una sono con non del si da le dei al nel come più anche i gli alla della lo "
    "ma se delle ha o su dal questo ci mi ne loro quando era essere stato suo sua nella dalla degli tra fra ed "
    "ai sulla questa tutto cui così solo dopo due perché chi molto prima già hanno poi fu io noi c'è l'ha "
    "dell'anno",
    "pt": "o de a que e do da em um para com não uma os no se na por mais as dos como mas ao ele das à seu sua ou "
    "quando muito nos já eu também só pelo pela até isso ela entre era depois sem mesmo aos ter seus quem nas "
    "me esse eles você essa num nem suas meu às minha numa foi são está tem pode ser há sobre foram nós lhe "
    "este esta",
    "nl": "de het een en van ik te dat die in je is niet zijn op aan met als voor er maar om dan zou of wat mijn men "
    "dit zo door over ze zich bij ook tot wordt naar hij heeft hebben was deze uit nog wel geen worden meer "
    "kunnen kan veel zij haar hun onder tegen na al werd toen daar waar ons wij u omdat moet deze tussen",
    "sv": "och i att det som en på är av för med till den har de inte om ett han men var jag sig från vi så kan man "
    "när år hade skulle vid hon nu ut här där efter under mot eller mycket också bara alla kommer än sin vara "
    "blir mer sina detta denna dessa andra över utan mellan varit finns många",
    "da": "og i at det er en til af på de den der som for med han har ikke et om var jeg sig men fra vi kan så være "
    "blev ved hun nu ud hvor efter også eller meget hvis når skal over havde deres dette denne disse mellem mod "
    "efter selv blive bliver kun alle andre før mange uden sin hans hendes af",
    "nb": "og i det er på som en til å for med av at har ikke den de han var et jeg om vi fra men så kan seg ble være "
    "hun ut når hvor etter også eller mye hvis skal over hadde deres dette denne disse mellom mot selv bli blir "
    "bare alle andre før mange uten sin hans hennes noe noen sier",
    "fi": "ja on ei se että oli hän ovat mutta kun joka ole myös niin kuin sen tai hänen mukaan vain jo nyt sekä olla "
    "siitä mitä voi tämä ollut sitä jos jotka ennen mikä jonka koska kuitenkin tämän kanssa minä minun sinä he "
    "me vielä sitten näin olisi joita siinä joiden ne nämä tässä kuten eli",
    "pl": "i w na z do się nie że to jest o jak po za od ale co tak dla już przez czy był jego są tym przy może tylko "
    "być która który które oraz jej ich było była ten ta te jako ma tego też bez pod nad przed między lub gdy "
    "aby kiedy bardzo więcej także jednak można sobie mi mnie go",
    "cs": "a v se na je že s z do o to i ve za pro k po od jako ale by tak byl jeho už co nebo jsou bylo podle při "
    "jen které který která jsem si aby jak když až být má mezi také však před byla byly této tohoto kde tento "
    "toto jejich může více proto již ze své své pod nad bez který",
    "ro": "de și în a la cu pe nu o că din un se este pentru care mai ce sunt au fost prin ca sau dar fi lui ei ele "
    "lor acest această aceste acestor după până când unde fără între sub peste foarte doar am ai are avea va "
    "vor era erau iar să le îi îl unui unei cele cel cea al ale",
    "tr": "ve bir bu da de için ile çok daha olarak gibi en ne kadar var olan sonra ama o ben sen biz siz onlar şu "
    "her ise değil ki mi mı mu mü ya hem veya ancak göre kendi bunu bunun onun diye iki büyük yeni olduğu "
    "olduğunu oldu olan tarafından arasında üzerine böyle şey içinde yok",
    "hu": "a az és hogy nem is egy meg ez azt de ha csak volt már van el mint még vagy sem aki ami ezt minden pedig "
    "után mert kell lehet így úgy amely amelyek volna voltak ő én te mi ti ők nagy két lesz majd között alatt "
    "szerint fel ki be le ahol amikor akkor illetve",
    "id": "yang dan di itu dengan untuk tidak ini dari dalam akan pada juga saya ke karena tersebut bisa ada mereka "
    "lebih kata tahun sudah atau saat oleh menjadi orang ia telah adalah seperti sebagai bahwa dapat para harus "
    "namun kita dua satu masih hari hanya banyak kami anda dia secara sangat setelah antara",
    "vi": "và của là có được cho trong không một những này các với để người đã khi từ đến như về ra cũng trên lại vào "
    "nhiều còn đó ông năm sẽ tại theo sau phải thì bị rất làm nhưng nếu chỉ đang hay bằng mà cả hơn",
    "ca": "de la i el a que en les per els amb del un una es no al com més són va dels seva seu aquest aquesta ha o "
    "entre però també fins on sense aquests des sobre tot ser està han era molt pel pels ens hi quan perquè què "
    "nosaltres dos anys l'any d'un d'una",
}
_CYRILLIC = {
    "ru": "и в не на что я с он а как это по к но из у за от так же для бы о до если или все было был его она они мы "
    "вы чтобы только при уже когда может ещё еще их том этом этого который которые которая также были была быть "
    "после между очень где нет ни есть под над без того ее её во со мне меня себя время году лет",
    "uk": "і в не на що я з він а як це до та за у від так же для про або але його вона вони ми ви щоб тільки при вже "
    "коли може ще їх цього який які яка також були була бути після між дуже де немає ні є під над без того її "
    "час року році й із чи якщо усі через",
    "bg": "и в не на да е се от за с по че са до като но си из или той тя те ние вие при още след само може има това "
    "този тази тези който която които също бил била били бъде между много където няма ни без под над му ѝ им ги "
    "го я ще във със когато ако година години",
}
_LANGUAGES = {**_LATIN, **_CYRILLIC}

WORDS: dict[str, frozenset[str]] = {language: frozenset(words.split()) for language, words in _LANGUAGES.items()}
"""Language -> its function words, in lower case."""

WEIGHTS: dict[str, dict[str, float]] = {}
"""Word -> language -> weight: 1 / number of languages in the list that have the word."""
for _language, _words in WORDS.items():
    for _word in _words:
        WEIGHTS.setdefault(_word, {})[_language] = 0.0
for _languages in WEIGHTS.values():
    for _language in _languages:
        _languages[_language] = 1.0 / len(_languages)
